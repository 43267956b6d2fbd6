"""Peculiarities of the robots of pybullet_envs_gymnasium. td3-robot keeps them, because they define these robots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from td3_robot_sims.backends.bullet.locomotion import Locomotion
from td3_robot_sims.backends.bullet.robots import MODELS

from tests.sims.policies import Random, Stand


@pytest.fixture
def robot(request: pytest.FixtureRequest) -> Iterator[Locomotion]:
    robot = Locomotion(MODELS[request.param], seed=0)
    robot.reset()
    yield robot
    robot.close()


robots = pytest.mark.parametrize("robot", list(MODELS), indirect=True)
ant = pytest.mark.parametrize("robot", ["Ant"], indirect=True)


@ant
def test_foot_contacts_are_one_step_old(robot: Locomotion) -> None:
    policy, observation = Random(3, 1.0), robot.reset()
    assert observation[-4:].tolist() == [0, 0, 0, 0]
    before = [0.0] * 4
    changes = 0
    for _ in range(250):
        observation = robot.step(policy(observation, 8)).observation
        assert observation[-4:].tolist() == before
        now = robot._world.feet_on_floor()
        changes += now != before
        before = now
    assert changes > 3, "the contacts hardly changed, so the test compared almost nothing"


@robots
def test_cost_uses_the_action_before_clipping(robot: Locomotion) -> None:
    size = robot.spec.action_size
    seen = []
    for scale in (1.0, 3.0):
        robot.reset(8)
        outcome = robot.step(np.full(size, scale, np.float32))
        seen.append((outcome.observation, robot.reward_terms()["electricity"]))
    (limited, cost), (beyond, higher_cost) = seen
    np.testing.assert_array_equal(limited, beyond)
    # If each value of the action is s, ``electricity`` is power·s + current·s². Here s is 1, then 3.
    current = -0.425 if robot.spec.name == "Humanoid" else -0.1
    assert higher_cost == pytest.approx(3 * (cost - current) + 9 * current, rel=1e-5)


@robots
def test_terms_add_up_to_the_reward(robot: Locomotion) -> None:
    policy, observation = Random(1, 1.0), robot.reset(1)
    assert robot.reward_terms() == {}
    for _ in range(15):
        outcome = robot.step(policy(observation, robot.spec.action_size))
        assert list(robot.reward_terms()) == ["alive", "progress", "electricity", "joints_at_limit"]
        assert sum(robot.reward_terms().values()) == outcome.reward
        if outcome.terminated:
            break


@pytest.mark.parametrize("robot", ["HalfCheetah"], indirect=True)
def test_half_cheetah_loses_reward_in_a_fall_and_its_episode_continues(robot: Locomotion) -> None:
    policy, observation = Random(2, 1.0), robot.reset(2)
    alive = []
    for step in range(1000):
        outcome = robot.step(policy(observation, 6))
        alive.append(robot.reward_terms()["alive"])
        assert not outcome.terminated
        assert outcome.truncated == (step == 999)
    assert set(alive) == {1.0, -1.0}


@pytest.mark.parametrize("robot", ["Humanoid"], indirect=True)
def test_humanoid_height_is_relative_to_80_centimetres(robot: Locomotion) -> None:
    assert robot.reset()[0] == pytest.approx(1.4 - 0.8, abs=0.05)


@pytest.mark.parametrize("robot", ["Walker2D", "Hopper", "HalfCheetah", "Ant"], indirect=True)
def test_height_is_relative_to_the_height_at_reset(robot: Locomotion) -> None:
    assert robot.reset()[0] == 0


@ant
def test_ant_earns_a_thousand_for_standing_still(robot: Locomotion) -> None:
    policy, observation = Stand("Ant", 0), robot.reset(0)
    total = 0.0
    for _ in range(1000):
        outcome = robot.step(policy(observation, 8))
        observation = outcome.observation
        total += outcome.reward
    assert total == pytest.approx(1000, abs=100)
    assert outcome[2:] == (False, True)


@pytest.mark.parametrize("robot", ["Walker2D"], indirect=True)
def test_a_fall_at_the_time_limit_terminates_and_truncates(robot: Locomotion) -> None:
    lengths = []
    for limit in (1000, None):
        policy, observation = Random(4, 1.0), robot.reset(4)
        robot.time_limit = limit or lengths[0]
        outcome = robot.step(policy(observation, 6))
        while not (outcome.terminated or outcome.truncated):
            outcome = robot.step(policy(outcome.observation, 6))
        lengths.append(robot.length)
    assert lengths[0] == lengths[1] < 100
    assert outcome[2:] == (True, True)
