"""The driver's contact with the policy server: when the driver may move the robot, and which messages it repeats."""

from __future__ import annotations

import re

import pytest

from td3_robot.driver.contact import HOLD_OFF
from td3_robot.driver.node import main, unset
from td3_robot.driver.robot import EmergencyStop
from td3_robot.errors import ConfigError
from td3_robot.messages import Heartbeat, LifecycleChange, Step, Welcome
from td3_robot.safety.limits import SafetyConfig, check_deadlines
from tests.driver.toy import SAFE, Make, Toy, action, one, operator, stops


def test_a_welcome_of_the_supervisor_is_not_answered_with_a_step(make_core: Make) -> None:
    """After a driver was silent, the supervisor welcomes the driver again.

    But only the policy server and the learner need the driver's Steps.
    """
    core = make_core(learner=True)
    assert core.step([("supervisor", Welcome(1, "supervisor", 6))], 0.003) == []
    assert [to for to, _ in core.step([("policy", Welcome(1, "policy", 6))], 0.004)] == ["policy"]


def test_when_the_server_returns_a_driver_repeats_the_stop_that_its_robot_raised(make_core: Make, robot: Toy) -> None:
    core = make_core()
    welcome = ("policy", Welcome(1, "policy", 6))
    assert stops(core.step([welcome], 0.001)) == []
    robot.sees = EmergencyStop("the red button")
    core.step([], 0.02)
    robot.sees = [1.0, 2.0, 3.0]
    for now in (0.025, 0.03):
        assert stops(core.step([welcome], now)) == ["leg: the red button"]
    core.step([operator("reset")], 0.035)
    assert stops(core.step([welcome], 0.036)) == []


def test_a_driver_does_not_turn_an_operators_stop_into_a_stop_of_all_robots(make_core: Make) -> None:
    """It is possible that the operator stopped only this robot."""
    core = make_core()
    core.step([operator("estop")], 0.01)
    assert core.guard.lifecycle.stopped
    assert stops(core.step([("policy", Welcome(1, "policy", 6))], 0.015)) == []


def test_an_operators_reset_ends_the_robots_own_stop(make_core: Make, robot: Toy) -> None:
    """First the robot itself stops all robots. The operator resets this stop, and later stops only this robot.

    After a new Welcome, the driver must not repeat the first stop.
    """
    core = make_core()
    robot.sees = EmergencyStop("the red button")
    core.step([], 0.02)
    robot.sees = [1.0, 2.0, 3.0]
    core.step([operator("reset"), operator("activate"), operator("estop")], 0.03)
    assert core.guard.lifecycle.stopped
    assert stops(core.step([("policy", Welcome(1, "policy", 6))], 0.035)) == []


def test_a_driver_does_not_move_the_robot_before_the_welcome(make_core: Make, robot: Toy) -> None:
    """While another driver of this name moves the robot, the server sends no Welcome."""
    core = make_core(welcomed=False)
    for now in (1.0, 1.2, 1.49):
        assert core.step([], now) == []
    assert core.due == 1.0 + HOLD_OFF == 1.5
    assert (robot.applied, robot.observed, core.contact.in_charge) == ([], 0, False)
    outputs = core.step([("policy", Welcome(1, "policy", 5))], 1.495)
    assert core.contact.in_charge
    assert robot.applied[0] == [0.25, 0.0]
    assert [type(message) for _, message in outputs] == [Step, LifecycleChange, LifecycleChange]


@pytest.mark.parametrize("deadline", [50, None])
def test_a_driver_makes_the_robot_safe_if_the_policy_server_does_not_answer(
    make_core: Make, robot: Toy, deadline: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy server is dead. An earlier driver may have died during a movement, so the robot could be moving."""
    core = make_core(SafetyConfig(safe_action={"left": 0.25}, action_deadline_ms=deadline), welcomed=False)
    core.step([], 1.0)
    for now in (1.5, 1.7, 2.0, 2.5):  # only the safe action, every 0.5 s: no observation, no reset, no Step
        assert core.step([], now) == []
    assert core.contact.in_charge
    assert core.due == 3.0
    assert (robot.applied, robot.observed) == ([[0.25, 0.0]] * 3, 0)
    assert [record.message for record in caplog.records if record.name == "td3_robot.driver.core"] == [
        "leg: the policy server has been silent for 0.5 s; until it answers, the robot gets only the safe action"
    ]
    assert one(core.step([("policy", Welcome(1, "policy", 5))], 2.6)).sequence == 0
    assert robot.observed == 1


def test_a_driver_with_a_rival_does_not_move_the_robot(make_core: Make, robot: Toy) -> None:
    """The server checks for up to 2 s whether another driver of this name is alive.

    Meanwhile it sends this driver a Heartbeat every 0.25 s instead of a Welcome.
    """
    core = make_core(welcomed=False)
    wait = ("policy", Heartbeat(0, 5))
    for number in range(9):
        assert core.step([wait], 1.0 + number * 0.25) == []
    assert core.due == 3.0 + HOLD_OFF
    assert (robot.applied, robot.observed, core.contact.in_charge) == ([], 0, False)
    core.step([], 3.5)  # the server has been silent for 0.5 s
    assert (robot.applied, core.contact.in_charge) == ([[0.25, 0.0]], True)
    core.step([wait], 3.6)
    assert not core.contact.in_charge
    core.step([("policy", Welcome(1, "policy", 5))], 3.7)
    assert core.contact.in_charge
    assert robot.observed == 1


def test_after_a_restart_of_the_server_a_driver_waits_for_a_new_welcome(make_core: Make, robot: Toy) -> None:
    """The restarted server may have welcomed another driver of this name, which then moves the robot."""
    core = make_core(welcomed=False)
    core.step([("policy", Welcome(1, "policy", 5))], 1.0)
    core.step([action(0, 1.5, -0.25)], 1.003)
    assert robot.applied[-1] == [1.5, -0.25]
    before = len(robot.applied)
    for now in (1.01, 1.26, 1.51):
        assert core.step([("policy", Heartbeat(0, 6))], now) == []
        assert core.step([], now + 0.2) == []
    assert (len(robot.applied), core.contact.in_charge) == (before, False)
    core.step([("policy", Welcome(1, "policy", 6))], 1.76)  # the other driver has ended
    assert core.contact.in_charge
    assert robot.applied[before:][0] == [0.25, 0.0]  # the deadline of 50 ms has passed


@pytest.mark.parametrize(
    ("safety", "named"),
    [
        (SafetyConfig(), ["safety.action_deadline_ms", "safety.hang_ms", "safety.safe_action"]),
        (SafetyConfig(safe_action="hold", hang_ms=500), ["safety.action_deadline_ms"]),
        (SafetyConfig(action_deadline_ms=50, hang_ms=500), ["safety.safe_action"]),
        (SAFE, ["safety.hang_ms"]),
        (SafetyConfig(safe_action="zero", action_deadline_ms=50, hang_ms=500), []),
    ],
)
def test_missing_settings_of_a_deployed_driver_are_named_in_one_line(safety: SafetyConfig, named: list[str]) -> None:
    line = unset(safety)
    assert re.findall(r"safety\.\w+", line) == named
    assert line.count("for ever") == len(named)
    assert "\n" not in line


@pytest.mark.parametrize("key", ["action_deadline_ms", "observation_deadline_ms"])
def test_a_deadline_that_is_not_longer_than_the_control_period_is_an_error(key: str, robot: Toy) -> None:
    """The control period is 20 ms."""
    check_deadlines(SafetyConfig(**{key: 20.5}), robot.spec)
    with pytest.raises(ConfigError) as caught:
        check_deadlines(SafetyConfig(**{key: 20.0}), robot.spec)
    assert str(caught.value) == f"safety.{key} is 20; allowed: more than 20, which is the control period of Toy in ms"


def test_an_object_that_is_no_robot_is_an_error(robot: Toy) -> None:
    with pytest.raises(TypeError, match=r"robot is <class '.*Toy'>; allowed: an object of a subclass of Robot"):
        main(Toy, "leg")  # type: ignore[arg-type]
    robot.spec = None  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"Toy\.spec is None; allowed: a RobotSpec"):
        main(robot, "leg")
