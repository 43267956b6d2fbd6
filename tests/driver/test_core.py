"""The driver's core: which actions it applies and when, and how it handles missing actions and failing hardware."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from td3_robot.core_types import Output
from td3_robot.driver.contact import HOLD_OFF
from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.driver.node import unset
from td3_robot.driver.pacing import RealTime
from td3_robot.driver.robot import EmergencyStop, Robot, RobotBody
from td3_robot.messages import (
    Action,
    ActionOrigin,
    Command,
    Heartbeat,
    LifecycleChange,
    Phase,
    Reply,
    Step,
    Welcome,
)
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Float32, RobotSpec

PERIOD = 0.02  # s, of the toy robot
SAFE = SafetyConfig(safe_action={"left": 0.25}, action_deadline_ms=50)
POLICY, HELD, SAFE_ORIGIN = ActionOrigin.POLICY, ActionOrigin.HELD, ActionOrigin.SAFE


class Toy(Robot):
    """A robot that observes ``sees``, or raises it, and records the actions it receives."""

    def __init__(self, spec: RobotSpec) -> None:
        self.spec = spec
        self.sees: Any = [1.0, 2.0, 3.0]
        self.motor: Exception | None = None
        self.ends = Phase.MID
        self.told: list[list[float]] = []
        self.resets = 0
        self.on_reset: Callable[[], object] = lambda: None

    def observe(self) -> Float32:
        if isinstance(self.sees, Exception):
            raise self.sees
        return np.array(self.sees, np.float32)

    def apply(self, action: Float32) -> None:
        if self.motor:
            raise self.motor
        self.told.append(action.tolist())

    def phase(self, observation: Float32) -> Phase:
        del observation
        return self.ends

    def reward(self, observation: Float32, action: Float32) -> float:
        return float(observation[0] + action[0])

    def reset(self) -> None:
        self.resets += 1
        self.on_reset()


@pytest.fixture
def robot(spec: RobotSpec) -> Toy:
    return Toy(spec)


Make = Callable[..., SourceCore]


@pytest.fixture
def make_core(robot: Toy) -> Make:
    def make(
        safety: SafetyConfig = SAFE, *, learner: bool = False, autostart: bool = True, holds_off: bool = False
    ) -> SourceCore:
        guard = Guard(robot.spec, "leg", safety, autostart=autostart)
        pacing = RealTime(robot.spec, "hold")
        core = SourceCore(
            RobotBody(robot),
            "leg",
            2,
            lockstep=False,
            pacing=pacing,
            guard=guard,
            learner=learner,
            waits=False,
            holds_off=holds_off,
        )
        if not holds_off:
            core.step([("policy", Welcome(1, "policy", 5))], 0.0)
        return core

    return make


def action(answers: int, *values: float, version: int = 7) -> tuple[str, Action]:
    return "policy", Action("leg", 2, answers, 0, np.array([values], np.float32), version, 0, 0)


def said(verb: str) -> tuple[str, Command]:
    return "policy", Command(5, "", verb, "", 0, "", b"")


def one(outputs: list[Output]) -> Step:
    [step] = [message for to, message in outputs if isinstance(message, Step) and to == "policy"]
    return step


def stops(outputs: list[Output]) -> list[str]:
    return [message.reason for _, message in outputs if isinstance(message, Command) and message.verb == "estop"]


def states(outputs: list[Output]) -> list[str]:
    return [message.state for _, message in outputs if isinstance(message, LifecycleChange)]


def test_an_action_is_applied_at_once_and_reported_in_the_next_step(make_core: Make, robot: Toy) -> None:
    """First observation at 0.0. Its Action comes at 0.003 and holds until the next one."""
    core = make_core()
    assert robot.told == [[0.25, 0.0]]  # the safe action, before any Action
    assert core.step([action(0, 1.5, -0.25)], 0.003) == []
    assert robot.told[1:] == [[1.5, -0.25]]
    step = one(core.step([], 0.02))
    assert (step.sequence, step.phase[0], step.origin, step.answered, step.weights_version) == (1, 1, POLICY, 0, 7)
    assert step.action.tolist() == [[1.5, -0.25]]
    assert step.reward.tolist() == [1 + 1.5]
    step = one(core.step([], 0.04))  # no Action for Step 1 yet: the motors hold the last one
    assert (step.origin, step.weights_version, step.action.tolist()) == (HELD, 0, [[1.5, -0.25]])
    assert len(robot.told) == 2
    assert core.step([action(0, 2.0, 0.0), action(1, 2.0, 0.0)], 0.041) == []  # both are late and are not applied
    assert len(robot.told) == 2
    assert core.counters["late_actions"] == 2


def test_the_action_deadline_is_checked_between_two_steps(make_core: Make, robot: Toy) -> None:
    """Fed at 0.003, deadline 50 ms: active until 0.053, safe at 0.0531, between the steps at 0.04 and 0.06."""
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    for now in (0.02, 0.04):
        core.step([], now)
    assert core.due == pytest.approx(0.053)
    assert core.step([], 0.0529) == []
    assert robot.told[-1] == [1.5, 0]
    outputs = core.step([], 0.0531)
    assert states(outputs) == ["fault"]
    assert robot.told[-1] == [0.25, 0]
    step = one(core.step([], 0.06))
    assert (step.origin, step.action.tolist(), step.weights_version) == (SAFE_ORIGIN, [[0.25, 0]], 0)
    told = len(robot.told)
    for number in range(4, 50):  # Actions return and are not applied
        core.step([action(number - 1, 1.5, 0)], number * PERIOD - 0.01)
        assert one(core.step([], number * PERIOD)).origin == SAFE_ORIGIN
    assert robot.told[told:] == [[0.25, 0]] * 46  # once a period
    assert core.guard.counters["actions_ignored"] == 46
    outputs = core.step([said("activate")], 0.99)
    [reply] = [message for _, message in outputs if isinstance(message, Reply)]
    assert (reply.id, reply.state, reply.error) == (5, "active", "")
    core.step([action(49, 1.25, 0)], 0.995)
    assert robot.told[-1] == [1.25, 0]


def test_automatic_recovery_after_the_recovery_time(make_core: Make, robot: Toy) -> None:
    """Recovery needs 39 ms of Actions, which are 20 ms apart: from 0.065 on, so the one at 0.105 is applied first."""
    core = make_core(SafetyConfig(action_deadline_ms=50, recovery="automatic", recovery_ms=39, safe_action="zero"))
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([], 0.02)
    assert states(core.step([], 0.061)) == ["fault"]  # Step 2
    applied = []
    for number in range(3, 8):
        core.step([action(number - 1, 1.5, 0)], number * PERIOD + 0.005)
        core.step([], (number + 1) * PERIOD)
        applied.append(robot.told[-1])
    assert applied == [[0, 0], [0, 0], [1.5, 0], [1.5, 0], [1.5, 0]]


def test_the_servers_safe_action_overrides_its_policys_action(make_core: Make, robot: Toy) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0), action(0, -0.5, 0.125, version=0)], 0.003)
    assert robot.told[-1] == [-0.5, 0.125]
    step = one(core.step([], 0.02))
    assert (step.origin, step.weights_version, step.answered) == (SAFE_ORIGIN, 0, 1)
    assert core.guard.lifecycle.active  # the server is present and sends actions


def test_the_robots_own_limits_always_hold(make_core: Make, robot: Toy) -> None:
    core = make_core(SafetyConfig(limits={"left": (-0.5, 1.0)}))
    core.step([action(0, 2.5, 0.5)], 0.003)
    assert robot.told[-1] == [1.0, 0.5]
    assert one(core.step([], 0.02)).action.tolist() == [[1.0, 0.5]]


def test_hold_repeats_the_last_applied_action(make_core: Make, robot: Toy) -> None:
    core = make_core(SafetyConfig(action_deadline_ms=50))
    assert robot.told == [[0, 0]]
    core.step([action(0, 1.5, 0.25)], 0.003)
    core.step([], 0.06)
    assert core.guard.lifecycle.state == "fault"
    assert robot.told[-1] == [1.5, 0.25]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([1.0, float("nan"), 3.0], "observe: ValueError: 'o1' is nan"),
        ([1.0, 2.0], "observe: ValueError: [2] numbers; needed are [3]"),
        (OSError("bus off"), "observe: OSError: bus off"),
    ],
)
def test_a_failing_sensor_is_a_fault_at_once_and_publishes_no_step(
    make_core: Make, robot: Toy, bad: Any, words: str
) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    good, robot.sees = robot.sees, bad
    outputs = core.step([], 0.02)
    assert states(outputs) == ["fault"]
    assert core.guard.lifecycle.reason == words
    assert robot.told[-1] == [0.25, 0]
    last = one(outputs)  # the episode ends with the last observation
    assert (last.phase[0], last.observation.tolist(), last.reward[0]) == (Phase.TRUNCATED, [[1, 2, 3]], 0)
    for number in range(2, 100):  # an old observation is never published as new
        assert core.step([], number * PERIOD) == []
        assert robot.told[-1] == [0.25, 0]
    assert core.step([("policy", Welcome(1, "policy", 6))], 99.5 * PERIOD) == []
    robot.sees = good
    step = one(core.step([], 100 * PERIOD))
    assert (step.sequence, step.phase[0], step.episode[0]) == (2, Phase.FIRST, 1)
    core.step([action(2, 1.5, 0)], 100.5 * PERIOD)
    assert robot.told[-1] == [0.25, 0]
    core.step([said("activate")], 100.6 * PERIOD)
    step = one(core.step([], 101 * PERIOD))
    core.step([action(3, 1.5, 0)], 101.5 * PERIOD)
    assert robot.told[-1] == [1.5, 0]


def test_a_failing_motor_is_a_fault_and_the_safe_action_is_retried(make_core: Make, robot: Toy) -> None:
    core = make_core()
    robot.motor = OSError("no torque")
    core.step([action(0, 1.5, 0)], 0.003)
    assert core.guard.lifecycle.reason == "apply: OSError: no torque"
    core.step([], 0.02)
    robot.motor = None
    core.step([], 0.04)
    assert robot.told[-1] == [0.25, 0]


def test_a_robot_can_stop_all_robots(make_core: Make, robot: Toy) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    robot.sees = EmergencyStop("the red button")
    outputs = core.step([], 0.02)
    assert [(to, m.verb, m.reason) for to, m in outputs if isinstance(m, Command)] == [
        ("policy", "estop", "leg: the red button")
    ]
    assert core.guard.lifecycle.stopped
    assert robot.told[-1] == [0.25, 0]
    robot.sees = [1.0, 2.0, 3.0]
    core.step([], 0.04)
    [reply] = [m for _, m in core.step([said("activate")], 0.05) if isinstance(m, Reply)]
    assert "reset it first" in reply.error
    core.step([said("reset"), said("activate")], 0.055)
    assert core.guard.lifecycle.active


def test_the_robot_is_reset_at_the_end_of_an_episode(make_core: Make, robot: Toy) -> None:
    core = make_core()
    assert robot.resets == 1
    core.step([action(0, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    step = one(core.step([], 0.02))
    assert (step.phase[0], step.transitions) == (Phase.TERMINATED, 1)
    told = len(robot.told)
    core.step([action(1, 1.5, 0)], 0.03)
    assert len(robot.told) == told  # an Action before a reset is ignored
    robot.ends = Phase.MID
    step = one(core.step([], 0.04))
    assert (step.phase[0], step.episode[0], step.action.tolist(), step.transitions) == (
        0,
        1,
        [[0.25, 0]],
        1,
    )  # the safe action, which the robot holds
    assert robot.resets == 2
    core.step([action(2, 1.5, 0)], 5.0)  # a reset of 5 s does not count as a missed deadline
    assert robot.told[-1] == [1.5, 0]


def test_without_autostart_the_driver_publishes_and_stays_safe(make_core: Make, robot: Toy) -> None:
    core = make_core(autostart=False)
    core.step([action(0, 1.5, 0)], 0.003)
    assert one(core.step([], 0.02)).origin == SAFE_ORIGIN
    core.step([said("configure"), said("activate")], 0.03)
    core.step([action(1, 1.5, 0)], 0.031)
    assert robot.told[-1] == [1.5, 0]


def test_a_shutdown_ends_the_driver(make_core: Make, robot: Toy) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([said("shutdown")], 0.01)
    assert core.guard.finished
    assert robot.told[-1] == [0.25, 0]


def test_a_learner_gets_the_same_steps(make_core: Make) -> None:
    core = make_core(learner=True)
    outputs = core.step([action(0, 1.5, 0)], 0.02)
    assert [to for to, message in outputs if isinstance(message, Step)] == ["policy", "learner"]


def test_a_robot_without_settings_keeps_the_limits_of_its_specification(make_core: Make, robot: Toy) -> None:
    """The channels allow [-1, 3] and [-0.5, 0.5]. An action inside passes bit for bit, even -0.0."""
    core = make_core(SafetyConfig())
    core.step([action(0, 1e9, -1e9)], 0.003)
    assert robot.told[-1] == [3.0, -0.5]
    assert one(core.step([], 0.02)).action.tolist() == [[3.0, -0.5]]
    assert core.guard.counters["actions_clipped"] == 1
    inside = np.array([[-0.0, 0.1]], np.float32)
    core.step([("policy", Action("leg", 2, 1, 0, inside, 7, 0, 0))], 0.023)
    assert np.array([robot.told[-1]], np.float32).tobytes() == inside.tobytes()


@pytest.mark.parametrize("deadline", [50, None])
def test_a_robot_is_reset_with_the_safe_action_applied(make_core: Make, robot: Toy, deadline: float | None) -> None:
    at_reset: list[list[float]] = []
    robot.on_reset = lambda: at_reset.append(robot.told[-1])
    core = make_core(SafetyConfig(safe_action={"left": 0.25}, action_deadline_ms=deadline))
    core.step([action(0, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    core.step([], 0.02)
    robot.ends = Phase.MID
    assert one(core.step([], 0.04)).phase[0] == Phase.FIRST
    assert at_reset == [[0.25, 0], [0.25, 0]]  # before the first episode, and between the first and the second
    assert robot.told[-1] == [0.25, 0]


def test_a_server_that_dies_during_a_reset_is_noticed(make_core: Make, robot: Toy) -> None:
    """The reset ends at 5.0. The deadline of 50 ms starts there."""
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    core.step([], 0.02)
    robot.ends = Phase.MID
    core.step([], 0.04)
    assert core.due == float("-inf")  # at once, so that the deadline starts at the end of the reset
    core.step([], 5.0)
    assert core.due == pytest.approx(5.02)  # the next period; the deadline is at 5.05
    assert core.guard.lifecycle.active
    assert one(core.step([], 5.0201)).origin == SAFE_ORIGIN
    core.step([], 5.0501)
    assert core.guard.lifecycle.state == "fault"
    newest = one(core.step([], 5.0601)).sequence
    core.step([action(newest, 1.5, 0)], 5.061)  # nobody has activated the driver
    assert robot.told[-1] == [0.25, 0]


def test_resetting_an_active_driver_keeps_its_deadline(make_core: Make) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([said("reset")], 0.01)
    core.step([], 0.02)
    core.step([], 0.0531)
    assert core.guard.lifecycle.state == "fault"


def test_only_the_policy_servers_welcome_is_answered_with_a_step(make_core: Make) -> None:
    """The supervisor may send a Welcome again after a pause."""
    core = make_core(learner=True)
    assert core.step([("supervisor", Welcome(1, "supervisor", 6))], 0.003) == []
    assert [to for to, _ in core.step([("policy", Welcome(1, "policy", 6))], 0.004)] == ["policy"]


def test_a_robots_own_stop_is_repeated_to_a_returning_server(make_core: Make, robot: Toy) -> None:
    core = make_core()
    welcome = ("policy", Welcome(1, "policy", 6))
    assert stops(core.step([welcome], 0.001)) == []
    robot.sees = EmergencyStop("the red button")
    core.step([], 0.02)
    robot.sees = [1.0, 2.0, 3.0]
    for now in (0.025, 0.03):
        assert stops(core.step([welcome], now)) == ["leg: the red button"]
    core.step([said("reset")], 0.035)
    assert stops(core.step([welcome], 0.036)) == []


def test_an_operators_stop_is_not_repeated_as_a_stop_of_all(make_core: Make) -> None:
    """The operator may have stopped only this robot."""
    core = make_core()
    core.step([said("estop")], 0.01)
    assert core.guard.lifecycle.stopped
    assert stops(core.step([("policy", Welcome(1, "policy", 6))], 0.015)) == []


def test_a_robots_own_stop_ends_with_its_reset(make_core: Make, robot: Toy) -> None:
    """Otherwise an operator's later stop of this robot would become a stop of all at the next server."""
    core = make_core()
    robot.sees = EmergencyStop("the red button")
    core.step([], 0.02)
    robot.sees = [1.0, 2.0, 3.0]
    core.step([said("reset"), said("activate"), said("estop")], 0.03)
    assert core.guard.lifecycle.stopped
    assert stops(core.step([("policy", Welcome(1, "policy", 6))], 0.035)) == []


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


def test_a_driver_does_not_move_the_robot_before_the_welcome(make_core: Make, robot: Toy) -> None:
    """Another driver may be in control. Then the server answers differently."""
    core = make_core(holds_off=True)
    for now in (1.0, 1.2, 1.49):
        assert core.step([], now) == []
    assert core.due == 1.0 + HOLD_OFF == 1.5
    assert (robot.told, robot.resets, core.contact.in_charge) == ([], 0, False)
    outputs = core.step([("policy", Welcome(1, "policy", 5))], 1.495)
    assert core.contact.in_charge
    assert robot.told[0] == [0.25, 0.0]
    assert [type(message) for _, message in outputs] == [Step, LifecycleChange, LifecycleChange]


@pytest.mark.parametrize("deadline", [50, None])
def test_a_driver_without_an_answer_makes_the_robot_safe(
    make_core: Make, robot: Toy, deadline: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy server is gone. An earlier driver may have been killed during a movement."""
    core = make_core(SafetyConfig(safe_action={"left": 0.25}, action_deadline_ms=deadline), holds_off=True)
    core.step([], 1.0)
    for now in (1.5, 1.7, 2.0, 2.5):  # only the safe action, every 0.5 s: no observation, no reset, no Step
        assert core.step([], now) == []
    assert core.contact.in_charge
    assert core.due == 3.0
    assert (robot.told, robot.resets) == ([[0.25, 0.0]] * 3, 0)
    assert [record.message for record in caplog.records if record.name == "td3_robot.driver.core"] == [
        "leg: not a word from the policy server for 0.5 s: the safe action, and nothing else until it is there"
    ]
    assert one(core.step([("policy", Welcome(1, "policy", 5))], 2.6)).sequence == 0
    assert robot.resets == 1


def test_a_driver_that_is_told_to_wait_does_not_move_the_robot(make_core: Make, robot: Toy) -> None:
    """Another driver may have its name. Until the server knows, it sends a Heartbeat every 0.25 s, for up to 2 s."""
    core = make_core(holds_off=True)
    wait = ("policy", Heartbeat(0, 5))
    for number in range(9):
        assert core.step([wait], 1.0 + number * 0.25) == []
    assert core.due == 3.0 + HOLD_OFF
    assert (robot.told, robot.resets, core.contact.in_charge) == ([], 0, False)
    core.step([], 3.5)  # now the server is gone too
    assert (robot.told, core.contact.in_charge) == ([[0.25, 0.0]], True)
    core.step([wait], 3.6)
    assert not core.contact.in_charge
    core.step([("policy", Welcome(1, "policy", 5))], 3.7)
    assert core.contact.in_charge
    assert robot.resets == 1


def test_a_driver_with_an_earlier_welcome_also_waits(make_core: Make, robot: Toy) -> None:
    """After a restart or a silence, the server knows another driver of this name, which moves the robot now."""
    core = make_core(SAFE, holds_off=True)
    core.step([("policy", Welcome(1, "policy", 5))], 1.0)
    core.step([action(0, 1.5, -0.25)], 1.003)
    assert robot.told[-1] == [1.5, -0.25]
    told = len(robot.told)
    for now in (1.01, 1.26, 1.51):
        assert core.step([("policy", Heartbeat(0, 6))], now) == []
        assert core.step([], now + 0.2) == []
    assert (len(robot.told), core.contact.in_charge) == (told, False)
    core.step([("policy", Welcome(1, "policy", 6))], 1.76)  # the other driver is gone
    assert core.contact.in_charge
    assert robot.told[told:][0] == [0.25, 0.0]  # the deadline of 50 ms has passed


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("what", ["motor", "sensor"])
def test_a_fault_that_persists_prevents_recovery(what: str, every: int, make_core: Make, robot: Toy) -> None:
    """Actions keep coming, while the motor or the sensor fails at every call or at every third call."""
    core = make_core(SafetyConfig(action_deadline_ms=50, recovery="automatic", recovery_ms=200, safe_action="zero"))
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([], 0.02)
    good, tried, apply = robot.sees, list[list[float]](), robot.apply

    def told(action: Float32) -> None:
        tried.append(action.tolist())
        apply(action)

    robot.apply = told  # type: ignore[method-assign]
    for number in range(2, 100):
        fails = OSError("flickers") if number % every == 0 else None
        if what == "motor":
            robot.motor = fails
        else:
            robot.sees = fails or good
        core.step([], number * PERIOD)
        core.step([action(core.next_sequence - 1, 1.5, 0)], number * PERIOD + 0.005)
    assert tried[5:] == [[0, 0]] * len(tried[5:])
    assert len(tried) > 90
    robot.motor, robot.sees = None, good
    for number in range(100, 120):
        core.step([], number * PERIOD)
        core.step([action(core.next_sequence - 1, 1.5, 0)], number * PERIOD + 0.005)
    assert robot.told[-1] == [1.5, 0]


def test_repeated_failures_are_logged_with_increasing_intervals(
    make_core: Make, robot: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 500 failures, the 1st, 2nd, 4th, …, 256th are logged, and only the first with a traceback."""
    core = make_core(learner=True)
    good = robot.sees
    for number in range(1, 1001):
        robot.sees = OSError("bus off") if number % 2 else good
        core.step([], number * PERIOD)
    said = [record for record in caplog.records if "observe: OSError: bus off" in record.getMessage()]
    said = [record for record in said if record.name.endswith("robot")]
    assert len(said) == 9
    assert [bool(record.exc_info) for record in said] == [True] + [False] * 8
    assert said[-1].getMessage() == "observe: OSError: bus off (for the 256th time)"


def test_complex_observations_are_refused(make_core: Make, robot: Toy) -> None:
    core = make_core()
    robot.observe = lambda: np.array([1.0, 2.0 + 1.0j, 3.0])  # type: ignore[assignment, method-assign, return-value]
    core.step([], 0.02)
    assert core.guard.lifecycle.reason == "observe: ValueError: complex numbers; needed are real ones"
