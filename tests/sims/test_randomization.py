"""Randomized worlds: physics parameters, pushes, seeds and saved states. An empty randomization changes no result."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.bullet.client import BASE, Part
from td3_robot_sims.backends.bullet.locomotion import Locomotion
from td3_robot_sims.backends.bullet.robots import CONTROL_PERIOD, MODELS
from td3_robot_sims.backends.bullet.world import World
from td3_robot_sims.vector_env import VectorEnvironment

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import BundleError, ConfigError
from td3_robot.messages import Phase
from td3_robot.specs import Float32
from tests.contract.test_simulator_backends import TWO_LEGS
from tests.sims.conftest import make, randomization
from tests.sims.policies import Random, Stand

EVERYTHING = {
    "mass": [0.8, 1.2],
    "friction": [0.5, 1.5],
    "motor_strength": [0.7, 1.3],
    "joint_damping": [0.0, 0.5],
    "action_latency": [0, 3],
    "action_jitter": [0, 2],
    "sensor_noise": {"all": [0.0, 0.1], "velocity": [0.2, 0.3]},
    "sensor_bias": {"attitude": [-0.05, 0.05]},
    "push": {"force": [20, 60], "duration": [0.05, 0.2], "interval": [0.3, 0.6]},
    "tilt": [0.0, 0.1],
}


def world_of(robot: Locomotion) -> World:
    return robot._world


def act(robot: Any, seed: int, steps: int) -> list[Any]:
    """Return the outcomes of random actions, and the first observation and the world of each new episode."""
    policy, lines = Random(seed, 1.0), []
    for _ in range(steps):
        outcome = robot.step(policy(np.zeros(0, np.float32), robot.spec.action_size))
        lines.append((outcome.observation.tolist(), *outcome[1:]))
        if outcome.terminated or outcome.truncated:
            lines.append((robot.reset().tolist(), dict(robot.world)))
    return lines


# -- off ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*tasks.names(), "gymnasium:Pendulum-v1"])
def test_an_empty_randomization_changes_no_bit(task: str, seed: int) -> None:
    plain, off = tasks.make(task, seed), tasks.make(task, seed, RandomizationConfig())
    assert off.reset().tolist() == plain.reset().tolist()
    assert act(off, seed, 200) == act(plain, seed, 200)
    assert off.world == {}
    assert off.save_state()["random"].tolist() == plain.save_state()["random"].tolist()
    plain.close()
    off.close()


def test_each_key_turns_randomization_on_but_a_push_needs_a_force() -> None:
    assert not RandomizationConfig().on
    assert not randomization(push={"interval": [3, 4]}).on
    for key, value in EVERYTHING.items():
        assert randomization(**{key: value}).on, key


@pytest.mark.parametrize("task", ["Walker2D", "Ant"])
def test_factors_of_one_change_nothing(task: str, seed: int) -> None:
    """Randomization draws four numbers before the reset noise.

    The test also draws four numbers from the plain robot's generator, so both robots draw the same reset noise.
    """
    drawn = make(task, seed, mass=[1, 1], friction=[1, 1], motor_strength=[1, 1], joint_damping=[0, 0])
    plain = tasks.make(task, seed)
    plain.random.integers(2**63, size=4)  # type: ignore[attr-defined]
    assert drawn.reset().tolist() == plain.reset().tolist()
    policy = Random(seed, 1.0)
    for _ in range(20):
        action = policy(np.zeros(0, np.float32), plain.spec.action_size)
        outcome = plain.step(action)
        np.testing.assert_array_equal(drawn.step(action).observation, outcome.observation)
        if outcome.terminated:
            break
    drawn.close()
    plain.close()


# -- physics -----------------------------------------------------------------------------------------------------------


def parts(world: World) -> list[Part]:
    """The properties of every part of the robot, as Bullet reports them."""
    return [world.client.part(world._robot, index) for index in range(BASE, world._link_count)]


@pytest.mark.parametrize("task", tasks.names())
def test_bullet_has_the_drawn_masses_and_friction(task: str, seed: int) -> None:
    robot, plain = make(task, seed, mass=[0.5, 2.0], friction=[0.2, 1.8]), Locomotion(MODELS[task], seed)
    seen = set()
    for _ in range(4):
        robot.reset()
        factor, friction = robot.world["mass"], robot.world["friction"]
        assert 0.5 <= factor <= 2
        assert 0.2 <= friction <= 1.8
        seen.add(factor)
        for mine, theirs in zip(parts(world_of(robot)), parts(world_of(plain)), strict=True):
            assert mine.mass == pytest.approx(theirs.mass * factor)
            assert mine.friction == theirs.friction
            assert mine.inertia == pytest.approx(tuple(value * factor for value in theirs.inertia))
        world = world_of(robot)
        assert world.client.part(world._floor, BASE).friction == pytest.approx(0.8 * friction)
    assert len(seen) == 4, "two episodes have the same factor for the mass"
    robot.close()
    plain.close()


def test_motor_strength_scales_torques_and_not_their_cost(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    robot, plain = make("Hopper", seed, motor_strength=[0.5, 1.5]), tasks.make("Hopper", seed)
    applied: list[list[float]] = []
    monkeypatch.setattr(World, "advance", lambda _, torques: applied.append(torques))
    robot.reset()
    plain.reset()
    action = np.array([0.5, -1.0, 2.0], np.float32)
    robot.step(action)
    plain.step(action)
    strength = robot.world["motor_strength"]
    assert applied[1] == [37.5, -75.0, 75.0]  # an action of 1 gives 0.75 · 100 N·m; 2 counts as 1
    assert applied[0] == pytest.approx([strength * torque for torque in applied[1]])
    # The replaced ``advance`` moves nothing, so the motors' power is 0. The term contains only the motors' current:
    # -0.1 · the mean of 0.5², 1² and 2².
    assert robot.reward_terms()["electricity"] == pytest.approx(-0.175, abs=1e-6)
    robot.close()
    plain.close()


def test_damping_brakes_a_joint() -> None:
    """A joint of an Ant in free fall starts at 3 rad/s without torque. More damping gives a lower final speed."""
    speeds = []
    for damping in (0.0, 1.0, 4.0):
        world = World(MODELS["Ant"])
        world.vary(None, None, damping)
        world.reset([0.0] * 8)
        world.client.place(world._robot, [0, 0, 9], [0, 0, 0, 1])
        world.client.set_joints(world._robot, world._joints[:1], [0.0], speed=3.0)
        for _ in range(10):
            world.advance([0.0] * 8)
        speeds.append(world.joints()[1][0])
        world.close()
    assert speeds[0] > speeds[1] + 0.05 > speeds[2] + 0.1 > 0.1, speeds


@pytest.mark.parametrize("task", tasks.names())
@pytest.mark.parametrize("side", [0.0, 1.0, math.pi / 2, math.pi, -2.0])
def test_a_tilt_turns_the_robot_in_the_direction_of_the_tilt(task: str, side: float) -> None:
    """A forward tilt is a positive pitch. A tilt to the left is a negative roll. The lowest point does not sink."""
    world, joints = World(MODELS[task]), len(MODELS[task].joints)
    world.reset([0.0] * joints)
    before, lowest = world.body(), world._lowest()
    world.tilt(0.1, side)
    body = world.body()
    expected = (-0.1 * math.sin(side), 0.1 * math.cos(side))
    if world._planar:
        expected = (0.0, math.copysign(0.1, math.cos(side)))
    assert (body.roll - before.roll, body.pitch - before.pitch) == pytest.approx(expected, abs=0.005)
    assert body.velocity == pytest.approx((0, 0, 0))
    assert world._lowest() >= lowest - 1e-6
    assert abs(body.z - before.z) < 0.2
    world.close()


def test_tilts_are_drawn_and_reported() -> None:
    robot = make("Ant", 3, tilt=[0.05, 0.1])
    for _ in range(5):
        observation = robot.reset()
        tilt, side = robot.world["tilt"], robot.world["tilt_direction"]
        assert 0.05 <= tilt <= 0.1
        roll, pitch = observation[6:8]
        assert (roll, pitch) == pytest.approx((-tilt * math.sin(side), tilt * math.cos(side)), abs=0.005)
        # Observed heights are relative to the height after the tilt.
        assert observation[0] == 0
    robot.close()


# -- pushes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", tasks.names())
@pytest.mark.parametrize("side", [0.0, math.pi / 2, 2.5])
def test_a_push_moves_the_torso_in_the_direction_of_the_push(task: str, side: float) -> None:
    """A push of 200 N for one control period changes the torso's velocity in the direction of the push."""
    velocities = []
    for force in (0.0, 200.0):
        world = World(MODELS[task])
        world.reset([0.0] * len(MODELS[task].joints))
        if force:
            world.push(force, side)
        world.advance([0.0] * len(MODELS[task].joints))
        velocities.append(np.array(world.body().velocity[:2]))
        planar = world._planar
        world.close()
    difference = velocities[1] - velocities[0]
    way = np.array([math.copysign(1, math.cos(side)), 0.0]) if planar else np.array([math.cos(side), math.sin(side)])
    assert difference @ way > 0.01
    assert difference @ way > 0.95 * np.linalg.norm(difference)


def test_pushes_follow_their_schedule(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A push lasts 3 control periods of 0.0165 s.

    The first push starts in one of the periods 0 to 19. From then on, a push starts every 20 periods.
    """
    pushed: list[tuple[int, float, float]] = []
    robot = make("Ant", seed, push={"force": [50, 60], "duration": [0.05, 0.05], "interval": [0.33, 0.33]})
    monkeypatch.setattr(World, "push", lambda _, force, side: pushed.append((robot.length, force, side)))
    robot.reset()
    stand, observation = Stand("Ant", seed), np.zeros(28, np.float32)
    for _ in range(90):
        observation = robot.step(stand(observation, 8)).observation
    start = math.floor(robot.world["push.start"] / CONTROL_PERIOD)
    assert 0 <= start < 20
    due = [period for period in range(90) if period >= start and (period - start) % 20 < 3]
    assert [step - 1 for step, _, _ in pushed] == due
    assert {force for _, force, _ in pushed} == {robot.world["push.force"]}
    sides = [side for _, _, side in pushed]
    assert sides[0] == sides[1] == sides[2] != sides[3]
    robot.close()


def test_a_robot_with_a_fixed_joint_between_root_link_and_torso_is_not_planar(tmp_path: Path) -> None:
    """The robot tilts to its left, and is pushed to its left. A planar robot moves only ahead and back."""
    text = Path(TWO_LEGS.file).read_text(encoding="utf-8").replace('link="body"', 'link="torso"')
    inertial = text[text.index("<inertial>") : text.index("</inertial>")] + "</inertial>"
    root = f"""<link name="base_link">{inertial}</link>
        <joint name="base_to_torso" type="fixed"><parent link="base_link"/><child link="torso"/></joint>"""
    file = tmp_path / "torso.urdf"
    file.write_text(text.replace('<link name="body">', f'{root}<link name="torso">'), encoding="utf-8")
    world = World(replace(TWO_LEGS, file=str(file)))
    world.reset([0.0, 0.0], 0.1, math.pi / 2)
    body = world.body()
    assert (body.roll, body.pitch) == pytest.approx((-0.1, 0.0), abs=0.005)
    assert world.joints()[0] == [0.0, 0.0]
    world.reset([0.0, 0.0])
    world.push(200.0, math.pi / 2)
    world.advance([0.0, 0.0])
    ahead, left, _ = world.body().velocity
    assert left > 0.1 > abs(ahead)
    world.close()


# -- seeds, states, refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["Walker2D", "Ant"])
def test_one_seed_gives_one_sequence_of_worlds(task: str, seed: int) -> None:
    first, again, other = (make(task, number, **EVERYTHING) for number in (seed, seed, seed + 1))
    starts = [robot.reset().tolist() for robot in (first, again, other)]
    assert starts[0] == starts[1] != starts[2]
    assert first.world == again.world != other.world
    assert act(first, seed, 150) == act(again, seed, 150)
    for robot in (first, again, other):
        robot.close()


def test_a_key_does_not_change_the_draws_of_other_keys(seed: int) -> None:
    one, two = make("Hopper", seed, friction=[0.5, 1]), make("Hopper", seed, **EVERYTHING)
    one.reset()
    two.reset()
    drawn = (one.world["friction"] - 0.5) / 0.5
    assert drawn == pytest.approx((two.world["friction"] - 0.5) / 1.0)
    one.close()
    two.close()


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["plain", "randomized"])
@pytest.mark.parametrize("steps", [0, 1, 37])
@pytest.mark.parametrize("task", tasks.names())
def test_a_restored_robot_continues_in_the_same_world(
    task: str, steps: int, settings: dict[str, Any], seed: int
) -> None:
    check_restored(task, steps, seed, settings)


def test_an_episode_does_not_depend_on_the_order_of_earlier_contacts() -> None:
    """A reset forgets the order of contacts.

    With this seed, two of the torso's three shapes have contacts at once. If the reset kept the order of these
    contacts, the order would change the episode.
    """
    check_restored("Humanoid", 0, 466044693, EVERYTHING)


def check_restored(task: str, steps: int, seed: int, settings: dict[str, Any]) -> None:
    """Save the state of one robot. Then restore this state in another robot, which has had other episodes before.

    Both robots must continue the episode in the same way.
    """
    original, other = make(task, seed, **settings), make(task, seed + 1, **settings)
    original.reset()
    act(original, 1, 60)
    original.reset()
    act(original, 2, steps)
    state = original.save_state()
    expected = act(original, 3, 80)
    other.reset()
    act(other, 4, 30)  # an earlier world must not affect the restored one
    other.restore_state(state)
    assert act(other, 3, 80) == expected
    original.close()
    other.close()


@pytest.mark.parametrize("randomized", [False, True])
@pytest.mark.parametrize("task", tasks.names())
def test_a_reset_forgets_the_contacts_of_the_earlier_episode(task: str, randomized: bool, seed: int) -> None:
    """A saved state holds only the current episode, so a reset must remove the contact points of earlier episodes."""
    robot = make(task, seed, mass=[0.9, 1.1]) if randomized else tasks.make(task, seed)
    world = world_of(robot)
    robot.reset()
    while not world.client.touching(world._robot, world._floor):
        act(robot, 1, 1)
    robot.reset()
    for other in (world._floor, world._robot):
        assert world.client.touching(world._robot, other) == []
    robot.close()


def test_a_state_with_another_randomization_is_refused() -> None:
    original, plain = make("Hopper", 1, **EVERYTHING), tasks.make("Hopper", 1)
    original.reset()
    original.step(np.ones(3, np.float32))
    with pytest.raises(BundleError, match=r"one of these has changed: .*, the processor or the randomization$"):
        plain.restore_state(original.save_state())
    original.close()
    plain.close()


def test_the_first_step_of_each_episode_reports_its_world(seed: int) -> None:
    config = randomization(mass=[0.5, 2], action_latency=[0, 3])
    robots = VectorEnvironment(lambda number: tasks.make("Hopper", number, config), 3, seed, "sim-0", 0)
    actions: Float32 = np.ones((3, 3), np.float32)
    seen = []
    for _ in range(80):
        robots.step(actions)
        first = {str(index) for index in np.flatnonzero(robots.phase == Phase.FIRST)}
        assert robots.world.keys() == first
        assert all(world.keys() == {"mass", "action_latency"} for world in robots.world.values())
        seen += [world["mass"] for world in robots.world.values()]
    assert len(set(seen)) == len(seen) >= 6
    robots.close()


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"mass": (1.0, 2.0)}, r"mass is \[1.0, 2.0\]"),
        ({"sensor_noise": {"height": (0.0, 1.0)}}, "sensor_noise.height"),
        ({"push": {"force": (1.0, 2.0)}}, "push.force"),
        ({"tilt": (0, 0.1)}, "tilt"),
    ],
)
def test_gymnasium_tasks_refuse_keys_that_only_walking_robots_have(content: dict[str, Any], key: str) -> None:
    words = f"randomization.{key}.*; the backend 'gymnasium' of the task supports only the keys: action_latency"
    with pytest.raises(ConfigError, match=words):
        make("gymnasium:Pendulum-v1", **content)
    with pytest.raises(ConfigError, match=words):
        tasks.check("gymnasium:Pendulum-v1", randomization(**content))
    assert tasks.check("gymnasium:Pendulum-v1", randomization(push={"interval": [3, 4]})).observation_size == 3
