"""Delayed actions and noisy observations of a randomized robot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.bullet.robots import MODELS, observation_groups
from td3_robot_sims.backends.disturbance import Disturbance

from td3_robot.specs import RobotSpec
from tests.sims.conftest import make, randomization


def disturbance(spec: RobotSpec, seed: int, **content: Any) -> Disturbance:
    result = Disturbance(randomization(**content), spec, ["all"] * spec.observation_size)
    result.begin(np.random.default_rng(seed))
    return result


@pytest.mark.parametrize("latency", [0, 1, 4])
def test_a_latency_of_n_delays_actions_by_n_periods(spec: RobotSpec, latency: int, seed: int) -> None:
    late = disturbance(spec, seed, action_latency=[latency, latency])
    assert late.world == {"action_latency": latency}
    sent = [np.array([number, 0.25], np.float32) for number in range(1, 10)]
    arrived = [late.delayed(action).tolist() for action in sent]
    assert arrived == [[0, 0]] * latency + [action.tolist() for action in sent[: 9 - latency]]


def test_latencies_are_drawn_evenly(spec: RobotSpec, seed: int) -> None:
    """600 draws of 0, 1 or 2: the expected count of each number is 200.

    The standard deviation of a count is √(600 · 1/3 · 2/3) = 11.5. The test allows 6 standard deviations.
    """
    late, random = disturbance(spec, seed, action_latency=[0, 2]), np.random.default_rng(seed)
    counts = [0, 0, 0]
    for _ in range(600):
        late.begin(random)
        counts[int(late.world["action_latency"])] += 1
    assert all(abs(count - 200) < 70 for count in counts), counts


def test_jitter_delays_each_action_and_drops_overtaken_actions(spec: RobotSpec, seed: int) -> None:
    jittery = disturbance(spec, seed, action_latency=[1, 1], action_jitter=[0, 2])
    ages = []
    newest = 0.0
    for number in range(1, 400):
        seen = float(jittery.delayed(np.array([number, 0], np.float32))[0])
        assert seen >= newest, "an old action replaced a newer one"
        newest = seen
        ages.append(number - seen)
    # An action arrives after 1, 2 or 3 periods. So the applied action is 1, 2 or 3 periods older than the newest sent
    # action.
    assert set(ages[5:]) == {1, 2, 3}


def test_a_task_gets_the_delayed_action() -> None:
    """A Pendulum with a latency of 2 periods moves like a Pendulum without latency whose first two actions are 0."""
    late, plain = make("gymnasium:Pendulum-v1", 3, action_latency=[2, 2]), tasks.make("gymnasium:Pendulum-v1", 3)
    # Randomization draws four numbers. The plain robot draws four too, so that all later draws are equal.
    plain.random.integers(2**63, size=4)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(late.reset(), plain.reset())
    sent = [np.array([value], np.float32) for value in (2.0, -1.0, 0.5, 1.5, -2.0)]
    zero = np.zeros(1, np.float32)
    for now, then in zip(sent, [zero, zero, *sent], strict=False):
        np.testing.assert_array_equal(late.step(now).observation, plain.step(then).observation)
    assert late.save_state()["actions"].tolist() == [action.tolist() for action in sent]
    late.close()
    plain.close()


def test_noise_has_the_drawn_standard_deviation(seed: int) -> None:
    """The standard deviation of n = 9000 readings differs from σ by less than 6 σ/√(2n).

    The mean differs from 0 by less than 6 σ/√n.
    """
    robot = make("Ant", seed, sensor_noise={"joint_velocity": [0.05, 0.2]}, sensor_bias={"velocity": [0.1, 0.3]})
    robot.reset()
    noisy: Disturbance = robot.disturbance
    std, names = robot.world["sensor_noise.joint_velocity"], observation_groups(MODELS["Ant"])
    truth, count = np.zeros(28, np.float32), 9000
    readings = np.array([noisy.sensed(truth) for _ in range(count)], np.float64)
    for index, name in enumerate(names):
        column, expected = readings[:, index], 0.0
        if name == "velocity":
            expected = robot.world[f"sensor_bias.{robot.spec.observations[index].name}"]
            assert 0.1 <= expected <= 0.3
        if name == "joint_velocity":
            assert abs(column.std() - std) < 6 * std / math.sqrt(2 * count)
            assert abs(column.mean()) < 6 * std / math.sqrt(count)
        else:
            np.testing.assert_allclose(column, expected, atol=1e-6)
    biases = {value for name, value in robot.world.items() if name.startswith("sensor_bias.")}
    assert len(biases) == 3, "two channels have the same bias"
    robot.close()


def test_noise_keeps_readings_within_their_limits_and_does_not_change_rewards(seed: int) -> None:
    noisy, plain = make("Walker2D", seed, sensor_noise={"all": [9, 9]}), tasks.make("Walker2D", seed)
    # Randomization draws four numbers. The plain robot draws four too, so that all later draws are equal.
    plain.random.integers(2**63, size=4)  # type: ignore[attr-defined]
    noisy.reset()
    plain.reset()
    low = np.array([channel.low for channel in plain.spec.observations], np.float32)
    high = np.array([channel.high for channel in plain.spec.observations], np.float32)
    action = np.full(6, 0.1, np.float32)
    for _ in range(5):
        mine, theirs = noisy.step(action), plain.step(action)
        assert mine[1:] == theirs[1:]
        assert not np.array_equal(mine.observation, theirs.observation)
        assert np.all((low <= mine.observation) & (mine.observation <= high))
    noisy.close()
    plain.close()


def test_every_channel_has_its_group() -> None:
    for task in tasks.names():
        spec = tasks.spec(task)
        for channel, group in zip(spec.observations, observation_groups(MODELS[task]), strict=True):
            words = {"sin": "direction", "cos": "direction", "roll": "attitude", "pitch": "attitude"}
            end = channel.name.rsplit(".", 1)[1].split("_")[0]
            joint = group.startswith("joint_") and not channel.name.startswith("torso.")
            assert group == (f"joint_{end}" if joint else words.get(end, end)), channel.name
