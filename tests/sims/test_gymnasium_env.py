"""The robots as ``gymnasium.Env``, for other tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import td3_robot_sims.gymnasium_env
import torch
from gymnasium.utils.env_checker import check_env as gymnasium_check
from gymnasium.utils.passive_env_checker import env_render_passive_checker
from stable_baselines3 import TD3
from stable_baselines3.common.env_checker import check_env as sb3_check
from td3_robot_sims import tasks

from td3_robot.errors import ConfigError

ROBOTS = [f"td3_robot/{name}-v0" for name in tasks.names()]


@pytest.mark.parametrize("name", ROBOTS)
def test_checkers_find_no_problem(name: str) -> None:
    environment = gymnasium.make(name, render_mode="rgb_array", width=48, height=32)
    # pytest turns the checkers' warnings into errors. The test skips the render check: it opens a window, and there is
    # no display.
    gymnasium_check(environment.unwrapped, skip_render_check=True)
    environment.reset()
    env_render_passive_checker(environment.unwrapped)
    environment.close()
    environment = gymnasium.make(name)
    sb3_check(environment, warn=True)
    environment.close()


@pytest.mark.parametrize("name", ROBOTS)
def test_observations_and_rewards_equal_those_of_the_wrapped_environment(name: str) -> None:
    outside = gymnasium.make(name)
    inside = tasks.make(name.removeprefix("td3_robot/").removesuffix("-v0"))
    random = np.random.default_rng(0)
    observation, info = outside.reset(seed=3)
    np.testing.assert_array_equal(observation, inside.reset(3))
    assert info == {}
    ended = False
    for _ in range(30):
        if ended:
            np.testing.assert_array_equal(outside.reset()[0], inside.reset())
        action = random.uniform(-1, 1, inside.spec.action_size).astype(np.float32)
        observation, reward, terminated, truncated, info = outside.step(action)
        outcome = inside.step(action)
        np.testing.assert_array_equal(observation, outcome.observation)
        assert (reward, terminated, truncated) == outcome[1:]
        assert info == inside.reward_terms()
        assert sum(info.values()) == reward
        ended = terminated or truncated
    outside.close()
    inside.close()


def test_the_time_limit_truncates_the_episode() -> None:
    environment = gymnasium.make("td3_robot/HalfCheetah-v0")
    assert environment.spec is not None
    assert environment.spec.max_episode_steps == 1000
    environment.reset(seed=0)
    ends = [environment.step(np.zeros(6, np.float32))[2:4] for _ in range(1000)]
    assert ends == [(False, False)] * 999 + [(False, True)]
    environment.close()


def test_reset_works_after_close() -> None:
    environment = gymnasium.make("td3_robot/Hopper-v0").unwrapped
    first, _ = environment.reset(seed=4)
    environment.close()
    environment.close()
    with pytest.raises(RuntimeError, match="reset"):
        environment.step(np.zeros(3, np.float32))
    again, _ = environment.reset(seed=4)
    np.testing.assert_array_equal(first, again)
    environment.step(np.zeros(3, np.float32))
    environment.close()
    other, _ = environment.reset()
    assert not np.array_equal(first, other)
    environment.close()


def test_pictures_have_the_requested_size() -> None:
    environment = gymnasium.make("td3_robot/Ant-v0", render_mode="rgb_array", width=80, height=60)
    environment.reset(seed=0)
    picture = environment.render()
    assert isinstance(picture, np.ndarray)
    assert (picture.shape, picture.dtype) == ((60, 80, 3), np.uint8)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20
    environment.close()


_IN_A_WINDOW = """
import ctypes, gymnasium, numpy, time, td3_robot_sims.gymnasium_env
from td3_robot_sims.backends.bullet import c_api as b3
from td3_robot.errors import ConfigError

class Camera(ctypes.Structure):  # b3OpenGLVisualizerCameraInfo; target is the point that the camera looks at
    _fields_ = (("size", ctypes.c_int * 2), ("others", ctypes.c_float * 47), ("target", ctypes.c_float * 3))

ask = b3._function("b3InitRequestOpenGLVisualizerCameraCommand", ctypes.c_void_p, result=ctypes.c_void_p)
read = b3._function("b3GetStatusOpenGLVisualizerCamera", ctypes.c_void_p, ctypes.POINTER(Camera))

def camera_target(client):
    camera = Camera()
    assert read(b3.submit(client._handle.address, ask(client._handle.address)), camera)
    return list(camera.target)

shown = gymnasium.make("td3_robot/Ant-v0", render_mode="human")
plain = gymnasium.make("td3_robot/Ant-v0")
assert (shown.reset(seed=0)[0] == plain.reset(seed=0)[0]).all()
robot = shown.unwrapped._robot._world
for number in range(30):
    action = numpy.full(8, 1.0 if number % 2 else -0.5, numpy.float32)
    mine, theirs = shown.step(action), plain.step(action)
    assert (mine[0] == theirs[0]).all() and mine[1:4] == theirs[1:4], number
deadline = time.monotonic() + 60  # a thread draws the window, and reports the camera of its last picture
while not numpy.allclose(camera_target(robot.client), robot._torso_position(), atol=1e-4):
    assert time.monotonic() < deadline, "the camera does not follow"
assert shown.render() is None
try:
    gymnasium.make("td3_robot/Walker2D-v0", render_mode="human").reset()
except ConfigError as error:
    print("refused:", error)
shown.close()
shown.reset(seed=1)
shown.close()
print("the window closed and opened again")
"""


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="a window needs a screen, and Xvfb is not installed")
def test_window_shows_the_same_world_and_follows_the_robot() -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        ["Xvfb", "-displayfd", str(write_end), "-screen", "0", "800x600x24"],
        pass_fds=(write_end,),
        stderr=subprocess.DEVNULL,
    ) as screen:
        os.close(write_end)
        try:
            with os.fdopen(read_end) as numbers:
                display = f":{numbers.readline().strip()}"  # Xvfb writes the number when the screen is ready
            child = subprocess.run(
                [sys.executable, "-c", _IN_A_WINDOW],
                env={**os.environ, "DISPLAY": display},
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            screen.terminate()
    assert child.returncode == 0, child.stderr[-2000:]
    assert "refused: render mode 'human': PyBullet shows at most one window per process" in child.stdout
    assert "the window closed and opened again" in child.stdout


def test_unknown_render_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'human' or 'rgb_array'"):
        td3_robot_sims.gymnasium_env.RobotEnv("Ant", render_mode="ansi")


def test_gymnasium_imports_the_module_in_front_of_the_id() -> None:
    code = (
        "import gymnasium; e = gymnasium.make('td3_robot_sims.gymnasium_env:td3_robot/Ant-v0'); "
        "e.reset(seed=1); print(e.spec.id); e.close()"
    )
    child = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (child.stdout, child.stderr) == ("td3_robot/Ant-v0\n", "")


def test_stable_baselines3_trains_on_a_robot() -> None:
    environment = gymnasium.make("td3_robot/Walker2D-v0")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = TD3("MlpPolicy", environment, learning_starts=100, batch_size=32, policy_kwargs={"net_arch": [32]}, seed=0)
    before = [parameter.detach().clone() for parameter in model.actor.parameters()]
    model.learn(400)
    assert model.num_timesteps == 400
    assert model._n_updates >= 250
    torch.set_num_threads(threads)
    assert any((a != b).any() for a, b in zip(before, model.actor.parameters(), strict=True))
    environment.close()


def test_reset_reports_a_randomized_world() -> None:
    ranges = {"mass": [0.5, 2.0], "push": {"force": [10, 20]}}
    environment = gymnasium.make("td3_robot/Ant-v0", randomization=ranges)
    _, info = environment.reset(seed=3)
    assert info.keys() == {"mass", "push.force", "push.duration", "push.interval", "push.start"}
    assert 0.5 <= info["mass"] <= 2
    assert environment.reset()[1] != info
    assert environment.reset(seed=3)[1] == info
    environment.close()
    with pytest.raises(ConfigError, match=r"unknown key 'randomization.mas'; did you mean 'mass'"):
        gymnasium.make("td3_robot/Ant-v0", randomization={"mas": [1, 2]})


def test_the_import_registers_the_robots() -> None:
    code = (
        "import gymnasium, td3_robot_sims.gymnasium_env\n"
        "print(*(name for name in gymnasium.registry if name.startswith('td3_robot/')))\n"
        "gymnasium.make('td3_robot/Walker2D-v0').close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    robots = ("Ant", "HalfCheetah", "Hopper", "Humanoid", "Walker2D")
    assert sorted(done.stdout.splitlines()[0].split()) == [f"td3_robot/{name}-v0" for name in robots]
