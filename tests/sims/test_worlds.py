"""Robots in one process do not affect each other, and free their memory."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.bullet import c_api as bullet_api
from td3_robot_sims.backends.bullet import floor
from td3_robot_sims.backends.bullet.c_api import pybullet
from td3_robot_sims.backends.bullet.robots import MODELS
from td3_robot_sims.backends.bullet.world import World

from td3_robot.errors import ConfigError
from tests.contract.test_simulator_backends import TWO_LEGS
from tests.sims.policies import Random


def test_robots_in_one_process_do_not_affect_each_other() -> None:
    alone = []
    for seed, task in enumerate(tasks.names()):
        robot = tasks.make(task, seed)
        policy = Random(seed, 1.0)
        alone.append([robot.reset(), *(robot.step(policy(np.zeros(0), robot.spec.action_size))[0] for _ in range(12))])
        robot.close()

    crowd = [tasks.make(task, seed) for seed, task in enumerate(tasks.names())]
    policies = [Random(seed, 1.0) for seed in range(len(crowd))]
    for robot, seen in zip(crowd, alone, strict=True):
        np.testing.assert_array_equal(robot.reset(), seen[0])
    for step, (robot, policy, seen) in product(range(1, 13), zip(crowd, policies, alone, strict=True)):
        observation = robot.step(policy(np.zeros(0), robot.spec.action_size)).observation
        np.testing.assert_array_equal(observation, seen[step])
        if step == 6:
            robot.render(32, 24)  # rendering changes nothing
    for robot in crowd:
        robot.close()


def test_a_robot_can_have_only_one_joint(tmp_path: Path) -> None:
    text = Path(TWO_LEGS.file).read_text(encoding="utf-8")
    text = re.sub(r'<(link|joint) name="(sensor|right_)\w*"[^>]*>.*?</\1>', "", text, flags=re.DOTALL)
    assert text.count("<joint") == 1
    file = tmp_path / "one_leg.urdf"
    file.write_text(text, encoding="utf-8")
    world = World(replace(TWO_LEGS, file=str(file), joints=(("left_hip", 50.0),), feet=("left_leg",)))
    world.reset([0.3])
    assert world.joints() == ([pytest.approx(0.3)], [0.0])
    world.close()


def test_each_reset_and_each_seed_gives_a_different_start() -> None:
    robot, other = tasks.make("Ant", seed=1), tasks.make("Ant", seed=2)
    starts = [robot.reset(), robot.reset(), other.reset()]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(starts[i], starts[j])
    np.testing.assert_array_equal(other.reset(seed=1), starts[0])
    np.testing.assert_array_equal(other.reset(), starts[1])
    robot.close()
    other.close()


def test_pictures_change_when_the_robot_moves() -> None:
    robot = tasks.make("Ant", seed=1)
    robot.reset()
    first = robot.render()
    assert first.shape == (480, 640, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, robot.render())
    for _ in range(20):
        robot.step(np.ones(8, np.float32))
    later = robot.render()
    # The camera follows the robot, so mostly its legs move in the picture.
    assert 0.001 < np.mean(np.any(first != later, axis=2)) < 0.9
    assert robot.render(64, 32).shape == (32, 64, 3)
    robot.close()


def test_worlds_are_freed_by_close_and_by_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    disconnect = bullet_api.disconnect
    monkeypatch.setattr(bullet_api, "disconnect", lambda handle: (freed.append(handle), disconnect(handle)))
    worlds = [World(MODELS["Hopper"]) for _ in range(3)]
    handles = [world.client._handle.address for world in worlds]
    assert len(set(handles)) == 3
    worlds[0].close()
    worlds[0].close()
    assert freed == handles[:1]
    del worlds
    gc.collect()
    assert sorted(freed) == sorted(handles)


def test_a_stored_error_does_not_keep_the_world_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    disconnect = bullet_api.disconnect
    monkeypatch.setattr(bullet_api, "disconnect", lambda handle: (freed.append(handle), disconnect(handle)))
    world = World(MODELS["Hopper"])
    monkeypatch.setattr(bullet_api, "ready", lambda _: 0)  # the value after the user has closed the window
    with pytest.raises(RuntimeError, match="closed its window") as kept:
        world.client.step()
    assert freed == []
    world.close()
    assert len(freed) == 1
    assert kept.tb is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closed_worlds_free_their_memory() -> None:
    """A Hopper takes more than 20 MB. Making and closing ten Hoppers adds less than 10 MB to the process."""
    code = """
from td3_robot_sims.backends.bullet.world import World
from td3_robot_sims.backends.bullet.robots import MODELS
from td3_robot.util.machine import resident_bytes
def some(count):
    for _ in range(count):
        World(MODELS["Hopper"]).close()
    return resident_bytes()
kept = World(MODELS["Hopper"])
before = some(3)
print(some(10) - before)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(child.stdout) < 10e6


def test_a_window_needs_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.raises(ConfigError, match="DISPLAY is not set"):
        World(MODELS["Ant"], show=True)


def test_a_robot_prints_nothing() -> None:
    code = "from td3_robot_sims import tasks; e = tasks.make('Ant', 0); e.reset(); e.close()"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (child.stdout, child.stderr) == ("", "")


def test_each_tile_of_the_floor_is_one_square_metre() -> None:
    """A camera 2 m above the origin looks down. Four tiles meet in the middle of the picture."""
    view = pybullet.computeViewMatrix((0.01, 0.01, 2.0), (0.01, 0.01, 0.0), (0.0, 1.0, 0.0))
    lens = pybullet.computeProjectionMatrixFOV(fov=90.0, aspect=1.0, nearVal=0.1, farVal=100.0)
    picture = floor.draw(40, 40, view, lens)  # 4 m by 4 m
    tiles = picture[5::10, 5::10, 0]
    assert len(np.unique(tiles)) == 2
    assert (tiles[:, 1:] != tiles[:, :-1]).all()  # as on a chessboard
    assert (tiles[1:] != tiles[:-1]).all()
    level = pybullet.computeViewMatrix((0, 0, 2.0), (1, 0, 2.0), (0.0, 0.0, 1.0))
    sky = floor.draw(8, 8, level, lens)[:4]
    assert (sky == sky[0, 0]).all()
