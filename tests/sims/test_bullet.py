"""World uses Bullet's C interface. World gives exactly the same results as PyBullet, and lets other threads run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pybullet
import pybullet_data
import pytest
from td3_robot_sims.backends.bullet import c_api as b3
from td3_robot_sims.backends.bullet import world as physics
from td3_robot_sims.backends.bullet.client import BASE, Client
from td3_robot_sims.backends.bullet.robots import MODELS
from td3_robot_sims.backends.bullet.world import World

from td3_robot.errors import ConfigError


class Twins(NamedTuple):
    """The same world twice: a :class:`World`, and a world made by PyBullet's Python functions."""

    world: World
    client: int
    floor: int
    robot: int
    driven: list[int]


@pytest.fixture(params=MODELS)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    model, data = MODELS[request.param], pybullet_data.getDataPath()
    world, client = World(model), pybullet.connect(pybullet.DIRECT)
    pybullet.setPhysicsEngineParameter(deterministicOverlappingPairs=1, physicsClientId=client)
    pybullet.setGravity(0, 0, -9.8, physicsClientId=client)
    pybullet.setDefaultContactERP(0.9, physicsClientId=client)
    pybullet.setPhysicsEngineParameter(
        fixedTimeStep=0.0165, numSolverIterations=5, numSubSteps=4, physicsClientId=client
    )
    (floor,) = pybullet.loadSDF(f"{data}/plane_stadium.sdf", physicsClientId=client)
    pybullet.changeDynamics(floor, -1, lateralFriction=0.8, restitution=0.5, physicsClientId=client)
    (robot,) = pybullet.loadMJCF(f"{data}/mjcf/{model.file}", flags=physics._LOAD_FLAGS, physicsClientId=client)
    names = {joint for joint, _ in model.joints}
    driven = []
    for joint in range(pybullet.getNumJoints(robot, client)):
        pybullet.setJointMotorControl2(robot, joint, pybullet.POSITION_CONTROL, force=0, physicsClientId=client)
        if pybullet.getJointInfo(robot, joint, client)[1].decode() in names:
            driven.append(joint)
    yield Twins(world, client, floor, robot, driven)
    world.close()
    pybullet.disconnect(client)


def theirs(twins: Twins) -> dict[str, list[float]]:
    """Return the same arrays as :func:`ours`, with the numbers that PyBullet's functions return."""
    _, client, _, robot, driven = twins
    links = range(pybullet.getNumJoints(robot, client))
    states = pybullet.getLinkStates(robot, links, computeLinkVelocity=1, physicsClientId=client)
    base, quaternion = pybullet.getBasePositionAndOrientation(robot, client)
    linear, angular = pybullet.getBaseVelocity(robot, client)
    joints = pybullet.getJointStates(robot, driven, client)
    return {
        "base": [*base, *quaternion, *linear, *angular],
        "joints": [number for joint in joints for number in joint[:2]],
        "links": [number for state in states for number in (*state[0], *state[1])],
        "link_velocities": [number for state in states for number in (*state[6], *state[7])],
    }


def ours(twins: Twins) -> dict[str, list[float]]:
    client, robot = twins.world.client, twins.world._robot
    client.look(robot, link_velocities=True)
    angles, speeds = client.positions[twins.world._angles], client.velocities[twins.world._speeds]
    links = twins.world._link_count
    return {
        "base": [*client.positions[:7], *client.velocities[:6]],
        "joints": [number for pair in zip(angles, speeds, strict=True) for number in pair],
        "links": client.links[: 7 * links],
        "link_velocities": client.link_velocities[: 6 * links],
    }


def test_all_numbers_equal_those_of_pybullet(twins: Twins, seed: int) -> None:
    """The test compares joints and masses at the start, all states after each step, and a picture at the end."""
    world, client, floor, robot, driven = twins
    for index, joint in enumerate(world.client.joints(world._robot)):
        info = pybullet.getJointInfo(robot, index, client)
        assert joint[1:] == (info[12].decode(), info[8], info[9], info[3], info[4])
        name = info[1].decode()
        # The names of fixed joints contain a counter that all worlds of a process share.
        assert joint.name == name or (joint.name[:8], name[:8]) == ("jointfix", "jointfix")
    for body, link in [(floor, BASE), *((robot, index) for index in range(BASE, world._link_count))]:
        mass, friction, inertia = pybullet.getDynamicsInfo(body, link, client)[:3]
        assert world.client.part(body, link) == (mass, inertia, friction)
    rng = np.random.default_rng(seed)
    touched = 0
    for _ in range(150):
        torques = rng.uniform(-60, 60, len(driven)).tolist()
        world.advance(torques)
        pybullet.setJointMotorControlArray(
            robot, driven, pybullet.TORQUE_CONTROL, forces=torques, physicsClientId=client
        )
        pybullet.stepSimulation(client)
        assert ours(twins) == theirs(twins)
        contacts = [contact[3] for contact in pybullet.getContactPoints(robot, floor, physicsClientId=client)]
        assert world.client.touching(world._robot, world._floor) == contacts
        touched += len(contacts)
        corner = min(pybullet.getAABB(robot, link, client)[0][2] for link in range(world._link_count))
        assert world.client.lowest(world._robot, range(world._link_count)) == corner
    assert touched > 20, "the robot hardly touched the floor, so the test compared few contacts"
    view = pybullet.computeViewMatrixFromYawPitchRoll([0, 0, 1], 3.0, 20.0, -30.0, 0.0, 2)
    lens = pybullet.computeProjectionMatrixFOV(60.0, 1.5, 0.1, 100.0)
    pybullet.changeVisualShape(floor, -1, rgbaColor=[1, 1, 1, 0], physicsClientId=client)
    _, _, pixels, _, bodies = pybullet.getCameraImage(
        60, 40, view, lens, shadow=0, renderer=pybullet.ER_TINY_RENDERER, physicsClientId=client
    )
    picture, shows_robot = world.client.picture(60, 40, view, lens)
    np.testing.assert_array_equal(picture, np.reshape(pixels, (40, 60, 4))[:, :, :3])
    np.testing.assert_array_equal(shows_robot, np.reshape(bodies, (40, 60)) == robot)


def test_a_step_lets_other_threads_run() -> None:
    """The switch interval is very long, so the other thread runs only if a step releases the interpreter lock."""
    world, asked, answered = World(MODELS["Ant"]), threading.Event(), threading.Event()

    def answer() -> None:
        asked.wait()
        answered.set()

    other = threading.Thread(target=answer)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        asked.set()
        end = time.monotonic() + 60
        while not answered.is_set() and time.monotonic() < end:
            world.client.step()
        assert answered.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()
        world.close()


def test_every_call_of_a_closed_world_raises_an_error() -> None:
    world = World(MODELS["Hopper"])
    client, robot = world.client, world._robot
    joint = client.joints(robot)[0]
    world.body()
    client.look(robot)
    world.close()
    calls: list[Any] = [
        client.step,
        client.save,
        lambda: client.look(robot),
        lambda: client.touching(robot, 0),
        lambda: client.picture(8, 8, [0.0] * 16, [0.0] * 16),
        lambda: client.drive(robot, 9, [0.0] * 3),
        lambda: client.restore(0),
        lambda: client.joints(robot),
        lambda: client.part(robot, 0),
        lambda: client.change(robot, 0, mass=1.0),
        lambda: client.release(robot, joint),
        lambda: client.load("any.sdf"),
        lambda: client.configure(*[1] * 5),
        lambda: client.set_joints(robot, [9], [0.0]),
        lambda: client.place(robot, [0.0] * 3, [0.0] * 4),
        lambda: client.push(robot, 0, [0.0] * 3, [0.0] * 3),
        lambda: client.lowest(robot, [0]),
        lambda: client.hide(robot),
        lambda: client.aim(1.0, 0.0, 0.0, [0.0] * 3),
        world.body,
        world.joints,
        world.feet_on_floor,
        lambda: world.advance([0.0] * 3),
        lambda: world.reset([0.0] * 3),
        lambda: world.render(8, 8),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_world_that_another_thread_steps_is_closed_between_two_steps() -> None:
    for _ in range(20):
        client, stepping = World(MODELS["Hopper"]).client, threading.Event()
        ends: list[str] = []

        def step(client: Client = client, stepping: threading.Event = stepping, ends: list[str] = ends) -> None:
            try:
                while True:
                    client.step()
                    stepping.set()
            except RuntimeError as error:
                ends.append(str(error))

        other = threading.Thread(target=step)
        other.start()
        stepping.wait()
        client.close()
        other.join()
        assert ends == ["this physics world is closed, or the user closed its window"]


def run(code: str) -> str:
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True, timeout=170
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout


def test_a_signal_handler_can_close_a_world_during_a_step() -> None:
    code = """
import signal
from td3_robot_sims.backends.bullet.world import World
from td3_robot_sims.backends.bullet.robots import MODELS
worlds = []
def close(number, frame):
    for world in worlds:
        world.close()
signal.signal(signal.SIGALRM, close)
for delay in range(1, 21):
    worlds[:] = [World(MODELS["Hopper"])]
    signal.setitimer(signal.ITIMER_REAL, delay * 1e-3)
    try:
        while True:
            worlds[0].advance([0.0] * 3)
            worlds[0].body()
            worlds[0].feet_on_floor()
    except RuntimeError as error:
        print(error)
"""
    ends = run(code).splitlines()
    assert len(ends) == 20
    assert set(ends) == {"this physics world is closed, or the user closed its window"}


def test_the_interpreter_can_end_while_threads_step() -> None:
    code = """
import threading
from td3_robot_sims.backends.bullet.world import World
from td3_robot_sims.backends.bullet.robots import MODELS
def step(world):
    while True:
        world.advance([0.0] * 3)
        world.body()
        begun.set()
for _ in range(3):
    begun = threading.Event()
    threading.Thread(target=step, args=(World(MODELS["Hopper"]),), daemon=True).start()
    begun.wait()
print("end")
"""
    for _ in range(3):
        assert run(code) == "end\n"


def test_loading_a_missing_file_raises_an_error() -> None:
    client = Client()
    with pytest.raises(RuntimeError, match="Bullet answered a command with"):
        client.load("/nowhere.xml")
    client.close()


def test_a_joint_with_several_degrees_of_freedom_is_refused(tmp_path: Path) -> None:
    inertial = '<inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial>'
    links = "".join(f'<link name="{name}">{inertial}</link>' for name in ("base", "ball"))
    joint = '<joint name="hip" type="spherical"><axis xyz="1 0 0"/><parent link="base"/><child link="ball"/></joint>'
    (tmp_path / "ball.urdf").write_text(f'<robot name="ball">{links}{joint}</robot>', encoding="utf-8")
    client = Client()
    body = client.load(str(tmp_path / "ball.urdf"))
    with pytest.raises(ConfigError, match="joint 'hip' has 3 degrees of freedom; allowed: 0 or 1"):
        client.joints(body)
    client.close()


def test_another_version_of_pybullet_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"API version 202101010; it must be 202010061, which pybullet 3.2.7 has$"):
        b3._check_version(202101010)
    with pytest.raises(ConfigError, match=r"does not export b3StepTwice; version 3.2.7 does$"):
        b3._function("b3StepTwice")
    client = World(MODELS["Hopper"]).client

    def shifted(handle: int, body: int, index: int, info: Any) -> None:
        del handle, body, index
        info._obj.index, info._obj.positions = 7, 1024

    monkeypatch.setattr(b3, "joint_info", shifted)
    with pytest.raises(ConfigError, match=r"the installed pybullet describes joint 0 in an unknown format; allowed: "):
        client.joints(1)


def test_uninitialised_memory_does_not_change_the_results() -> None:
    """The robots move in the same way in two runs with different bytes in new memory.

    glibc fills new memory with the complement of MALLOC_PERTURB_, so the value 170 gives the bytes 0x55. Without the
    fix in ``c_api``, these bytes change the motion of one of the six robots after step 12.
    """
    code = (
        "import hashlib, numpy as np\n"
        "from td3_robot_sims import tasks\n"
        "from td3_robot_sims.vector_env import VectorEnvironment\n"
        "from td3_robot.config.randomization import RandomizationConfig\n"
        "ranges = RandomizationConfig(mass=(0.8, 1.2))\n"
        "envs = VectorEnvironment(lambda seed: tasks.make('Humanoid', seed, ranges), 6, 8, 'sim-0', 0, threads=1)\n"
        "random, digest = np.random.default_rng(8), hashlib.sha256()\n"
        "for _ in range(100):\n"
        "    envs.step(random.uniform(-1.5, 1.5, envs.action.shape).astype(np.float32))\n"
        "    digest.update(envs.observation.tobytes())\n"
        "print(digest.hexdigest())"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MALLOC_PERTURB_": value},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[-1]
        for value in ("85", "170")
    ]
    assert found[0] == found[1]
