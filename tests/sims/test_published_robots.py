"""The robots repeat pybullet_envs_gymnasium 0.6.0, except for its flaws. Rewards differ by at most 1e-6."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.backends.bullet import world as physics
from td3_robot_sims.backends.bullet.locomotion import Locomotion
from td3_robot_sims.backends.bullet.robots import CONTROL_PERIOD

from tests.sims.policies import Policy, Random, Stand

SEEDS = (0, 1, 2)
ROBOTS = tasks.names()


@pytest.fixture(scope="module", params=ROBOTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, gymnasium.Env[Any, Any], Environment]]:
    """The task, the package's environment after its first reset, and our environment."""
    published, ours = make_published(request.param), tasks.make(request.param)
    published.reset()
    yield request.param, published, ours
    published.close()
    ours.close()


def make_published(task: str) -> gymnasium.Env[Any, Any]:
    importlib.import_module("pybullet_envs_gymnasium")
    return gymnasium.make(f"{task}BulletEnv-v0", disable_env_checker=True)


def policies(task: str, seed: int) -> list[Policy]:
    """Return a policy for each episode. Some policies make the robot fall. ``Stand`` reaches the time limit."""
    if task == "HalfCheetah":  # every episode lasts until the time limit
        return [Random(seed, 1.5), Stand(task, seed)]
    falls: list[Policy] = [Random(seed, 1.0), Random(seed, 1.5)]
    if task == "Humanoid":  # no policy keeps it upright; another test covers its time limit
        return [*falls, Random(seed, 0.3), Random(seed, 0.5)]
    if task == "Ant":  # weak actions make it fall
        return [Random(seed, 0.3), Stand(task, seed), Random(seed, 0.6)]
    return [falls[0], Stand(task, seed), falls[1]]


def episode_lines(published: Any, ours: Environment, policy: Policy, seed: int | None) -> Iterator[str]:
    """Run one episode in both environments. Yield a line per difference, then ``terminated`` or ``truncated``."""
    theirs, _ = published.reset(seed=seed)
    mine = ours.reset(seed)
    if theirs.dtype != mine.dtype or not np.array_equal(theirs, mine):
        yield f"reset: {theirs} != {mine}"
    step = 0
    while True:
        step += 1
        action = policy(mine, ours.spec.action_size)
        theirs, reward, *theirs_ended, _ = published.step(action)
        outcome = ours.step(action)
        mine = outcome.observation
        if not np.array_equal(np.float32(theirs), mine):
            where = [ours.spec.observations[i].name for i in np.flatnonzero(theirs != mine)]
            yield f"step {step}: observations differ in {where}"
        if not abs(reward - outcome.reward) <= 1e-6:
            yield f"step {step}: reward {reward} != {outcome.reward}"
        if theirs_ended != [outcome.terminated, outcome.truncated]:
            yield f"step {step}: ended {theirs_ended} != {outcome}"
        if any(theirs_ended):
            yield "terminated" if outcome.terminated else "truncated"
            return


def test_episodes_equal_those_of_the_package(pair: tuple[str, gymnasium.Env[Any, Any], Environment]) -> None:
    task, published, ours = pair
    ends: list[str] = []
    for seed in SEEDS:
        for number, policy in enumerate(policies(task, seed)):
            *differences, end = episode_lines(published, ours, policy, seed if number == 0 else None)
            assert differences == [], f"{task}, seed {seed}, episode {number}: {differences[:5]}"
            ends.append(end)
    # Some episodes must terminate, except with HalfCheetah. Some must be truncated, except with the Humanoid.
    assert task == "HalfCheetah" or ends.count("terminated") >= 2, ends
    assert task == "Humanoid" or ends.count("truncated") >= len(SEEDS), ends


def test_humanoid_reaches_its_time_limit_as_in_the_package() -> None:
    """With weak upward gravity the robot stays above its height limit. With normal gravity it falls."""
    published, ours = make_published("Humanoid"), tasks.make("Humanoid")
    assert isinstance(ours, Locomotion)
    published.reset()
    ends = []
    for seed in SEEDS:
        for gravity in (-0.1, physics.GRAVITY):
            published.unwrapped.scene.cpp_world.gravity = gravity  # the package applies this value at each reset
            ours._world.client.configure(
                gravity, CONTROL_PERIOD, physics.SUBSTEPS, physics.SOLVER_ITERATIONS, physics.CONTACT_ERP
            )
            *differences, end = episode_lines(published, ours, Random(seed, 0.5), seed)
            assert differences == [], f"seed {seed}, gravity {gravity}: {differences[:5]}"
            ends.append((end, ours.length))
    assert ends[::2] == [("truncated", 1000)] * len(SEEDS)
    assert all(end == "terminated" and length < 200 for end, length in ends[1::2]), ends
    published.close()
    ours.close()


@pytest.mark.parametrize("task", ROBOTS)
def test_first_episode_differs_from_the_package_only_at_its_start(task: str) -> None:
    published, ours = make_published(task), tasks.make(task)
    *differences, _ = episode_lines(published, ours, Random(5, 1.0), 5)
    *reset, reward = differences
    assert reward.startswith("step 1: reward"), differences
    assert all(line.startswith("reset:") for line in reset), differences
    again = make_published(task)
    theirs, _ = again.reset(seed=5)
    mine = ours.reset(5)
    assert set(np.flatnonzero(theirs != mine)) <= {1}, "only the direction to the target may differ"
    assert np.abs(theirs - mine).max() < 1e-5
    for environment in (published, again, ours):
        environment.close()


@pytest.mark.parametrize("task", ROBOTS)
def test_an_episode_is_the_same_in_a_fresh_and_in_a_used_environment(task: str) -> None:
    fresh, used = tasks.make(task), tasks.make(task, seed=77)
    for seed in (None, 3):
        used.reset(seed)
        walk(used, Random(1, 1.0), 60)
    first, later = fresh.reset(9), used.reset(9)
    np.testing.assert_array_equal(first, later)
    assert_same(walk(fresh, Random(9, 1.0), 200), walk(used, Random(9, 1.0), 200))
    fresh.close()
    used.close()


# Run Walker2D with random actions, first with the seed below one of these, then with the seed itself. In the second
# episode, a foot starts near a contact point of the first episode.
NEAR_A_CONTACT = (14715, 1022765, 1061499)


@pytest.mark.parametrize("seed", NEAR_A_CONTACT)
def test_an_episode_depends_on_the_episode_before_it_only_in_the_package(seed: int) -> None:
    """The package keeps contact points at a reset, and td3-robot forgets them.

    Without the episode before, the package and td3-robot give the same observations.
    """
    published, alone = make_published("Walker2D"), make_published("Walker2D")
    ours = tasks.make("Walker2D")
    published.reset()
    alone.reset()
    assert list(episode_lines(published, ours, Random(seed - 1, 1.0), seed - 1)) == ["terminated"]
    step, *_ = episode_lines(published, ours, Random(seed, 1.0), seed)
    assert step.startswith("step 1: observations differ"), step
    assert list(episode_lines(alone, ours, Random(seed, 1.0), seed)) == ["terminated"]
    for environment in (published, alone, ours):
        environment.close()


@pytest.mark.parametrize("seed", NEAR_A_CONTACT)
def test_a_saved_episode_continues_equally_in_a_fresh_robot(seed: int) -> None:
    used, fresh = tasks.make("Walker2D"), tasks.make("Walker2D")
    used.reset(seed - 1)
    walk(used, Random(seed - 1, 1.0), 60)
    used.reset(seed)
    walk(used, Random(seed, 1.0), 3)
    fresh.restore_state(used.save_state())
    expected, restored = walk(used, Random(4, 1.0), 20), walk(fresh, Random(4, 1.0), 20)
    assert len(expected) >= 5
    assert_same(expected, restored)
    used.close()
    fresh.close()


def walk(robot: Environment, policy: Policy, steps: int) -> list[Any]:
    """Return the outcomes of at most ``steps`` steps of the current episode."""
    outcomes = []
    observation = np.zeros(robot.spec.observation_size, np.float32)
    for _ in range(steps):
        outcome = robot.step(policy(observation, robot.spec.action_size))
        outcomes.append(outcome)
        observation = outcome.observation
        if outcome.terminated or outcome.truncated:
            break
    return outcomes


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Check that two walks have the same outcomes, bit for bit."""
    for a, b in zip(one, other, strict=True):
        assert a[1:] == b[1:]
        np.testing.assert_array_equal(a[0], b[0])


def test_specifications_fit_the_package(pair: tuple[str, gymnasium.Env[Any, Any], Environment]) -> None:
    task, published, ours = pair
    assert published.action_space.shape == (ours.spec.action_size,)
    assert published.observation_space.shape == (ours.spec.observation_size,)
    np.testing.assert_array_equal(published.action_space.low, ours.spec.action_low)
    np.testing.assert_array_equal(published.action_space.high, ours.spec.action_high)
    robot = published.unwrapped.robot
    joints = [joint.joint_name for joint in robot.ordered_joints]
    assert [channel.name for channel in ours.spec.actions] == [f"{joint}.torque" for joint in joints]
    assert [channel.name for channel in ours.spec.observations[8 : 8 + 2 * len(joints) : 2]] == [
        f"{joint}.position" for joint in joints
    ]
    assert [channel.name for channel in ours.spec.observations[8 + 2 * len(joints) :]] == [
        f"{foot}.contact" for foot in robot.foot_list
    ]
    assert published.spec is not None
    assert ours.time_limit == published.spec.max_episode_steps
    assert ours.spec.control_period == published.unwrapped.scene.dt
    gains = dict(zip(robot.motor_names, robot.motor_power, strict=True)) if task == "Humanoid" else {}
    for joint, channel in zip(robot.ordered_joints, ours.spec.actions, strict=True):
        torque = robot.power * gains.get(joint.joint_name, joint.power_coef)
        assert channel.meaning == f"joint torque; 1 is {torque:g} N·m"
