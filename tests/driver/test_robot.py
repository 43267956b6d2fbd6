"""A robot whose sensors or motors fail, or that stops all robots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from td3_robot.driver.robot import EmergencyStop
from td3_robot.messages import Command, Phase, Reply, Welcome
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Float32
from tests.driver.toy import PERIOD, Make, Toy, action, one, operator, states


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([1.0, float("nan"), 3.0], "observe: ValueError: 'o1' is nan"),
        ([1.0, 2.0], "observe: ValueError: the observation has the shape [2]; expected [3]"),
        (OSError("bus off"), "observe: OSError: bus off"),
    ],
)
def test_a_failing_sensor_is_a_fault_at_once_and_ends_the_episode(
    make_core: Make, robot: Toy, bad: Any, words: str
) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    good, robot.sees = robot.sees, bad
    outputs = core.step([], 0.02)
    assert states(outputs) == ["fault"]
    assert core.guard.lifecycle.reason == words
    assert robot.applied[-1] == [0.25, 0]
    last = one(outputs)  # the episode ends with the last observation
    assert (last.phase[0], last.observation.tolist(), last.reward[0]) == (Phase.TRUNCATED, [[1, 2, 3]], 0)
    for number in range(2, 100):  # an old observation is never published as new
        assert core.step([], number * PERIOD) == []
        assert robot.applied[-1] == [0.25, 0]
    assert core.step([("policy", Welcome(1, "policy", 6))], 99.5 * PERIOD) == []
    robot.sees = good
    step = one(core.step([], 100 * PERIOD))
    assert (step.sequence, step.phase[0], step.episode[0]) == (2, Phase.FIRST, 1)
    core.step([action(2, 1.5, 0)], 100.5 * PERIOD)
    assert robot.applied[-1] == [0.25, 0]
    core.step([operator("activate")], 100.6 * PERIOD)
    step = one(core.step([], 101 * PERIOD))
    core.step([action(3, 1.5, 0)], 101.5 * PERIOD)
    assert robot.applied[-1] == [1.5, 0]


def test_a_failing_motor_is_a_fault_and_the_safe_action_is_retried(make_core: Make, robot: Toy) -> None:
    core = make_core()
    robot.motor = OSError("no torque")
    core.step([action(0, 1.5, 0)], 0.003)
    assert core.guard.lifecycle.reason == "apply: OSError: no torque"
    core.step([], 0.02)
    robot.motor = None
    core.step([], 0.04)
    assert robot.applied[-1] == [0.25, 0]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("what", ["motor", "sensor"])
def test_a_fault_that_persists_prevents_recovery(what: str, every: int, make_core: Make, robot: Toy) -> None:
    """Actions continue to arrive, while the motor or the sensor fails in every period or in every third period."""
    core = make_core(SafetyConfig(action_deadline_ms=50, recovery="automatic", recovery_ms=200, safe_action="zero"))
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([], 0.02)
    good, tried, apply = robot.sees, list[list[float]](), robot.apply

    def record(action: Float32) -> None:
        tried.append(action.tolist())
        apply(action)

    robot.apply = record  # type: ignore[method-assign]
    for number in range(2, 100):
        fails = OSError("flickers") if number % every == 0 else None
        if what == "motor":
            robot.motor = fails
        else:
            robot.sees = fails or good
        core.step([], number * PERIOD)
        core.step([action(core.next_sequence - 1, 1.5, 0)], number * PERIOD + 0.005)
    assert tried[5:] == [[0, 0]] * len(tried[5:])  # the fault comes within the first 5 attempts
    assert len(tried) > 90
    robot.motor, robot.sees = None, good
    for number in range(100, 120):
        core.step([], number * PERIOD)
        core.step([action(core.next_sequence - 1, 1.5, 0)], number * PERIOD + 0.005)
    assert robot.applied[-1] == [1.5, 0]


def test_repeated_failures_are_logged_with_increasing_intervals(
    make_core: Make, robot: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 500 failures, the 1st, 2nd, 4th, …, 256th are logged, and only the first with a traceback."""
    core = make_core(learner=True)
    good = robot.sees
    for number in range(1, 1001):
        robot.sees = OSError("bus off") if number % 2 else good
        core.step([], number * PERIOD)
    logged = [record for record in caplog.records if "observe: OSError: bus off" in record.getMessage()]
    logged = [record for record in logged if record.name.endswith("robot")]
    assert len(logged) == 9
    assert [bool(record.exc_info) for record in logged] == [True] + [False] * 8
    assert logged[-1].getMessage() == "observe: OSError: bus off (256 times so far)"


def test_complex_observations_are_refused(make_core: Make, robot: Toy) -> None:
    core = make_core()
    robot.observe = lambda: np.array([1.0, 2.0 + 1.0j, 3.0])  # type: ignore[assignment, method-assign, return-value]
    core.step([], 0.02)
    assert core.guard.lifecycle.reason == "observe: ValueError: the observation is complex; allowed: real numbers"


def test_a_robot_can_stop_all_robots(make_core: Make, robot: Toy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    robot.sees = EmergencyStop("the red button")
    outputs = core.step([], 0.02)
    assert [(to, m.verb, m.reason) for to, m in outputs if isinstance(m, Command)] == [
        ("policy", "estop", "leg: the red button")
    ]
    assert core.guard.lifecycle.stopped
    assert robot.applied[-1] == [0.25, 0]
    for number in range(2, 50):  # the server sends each stop back, but only the first is news
        core.step([("policy", Command(0, "", "estop", "", 0, "", b""))], number * PERIOD + 0.001)
    assert [record.message for record in caplog.records if record.name.endswith("commands")] == []
    robot.sees = [1.0, 2.0, 3.0]
    core.step([], 0.99)
    [reply] = [m for _, m in core.step([operator("activate")], 1.0) if isinstance(m, Reply)]
    assert "reset it first" in reply.error
    core.step([operator("reset"), operator("activate")], 1.005)
    assert core.guard.lifecycle.active
    assert len([record for record in caplog.records if record.name.endswith("commands")]) == 3
