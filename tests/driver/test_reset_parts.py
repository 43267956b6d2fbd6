"""A reset with ``yield``: the driver makes one part in each control period, and can interrupt the reset."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from td3_robot.core_types import Input, Output
from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.driver.hang import EXIT_HUNG, HangWatch
from td3_robot.driver.pacing import RealTime
from td3_robot.driver.robot import EmergencyStop, RobotBody
from td3_robot.messages import Heartbeat, MotorCommand, Phase, RobotReport, Step, Welcome
from td3_robot.recording.boundary import RecordedBody, RecordedCore
from td3_robot.replay.driver import ReplayedBody
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from td3_robot.transport import codec
from tests.driver.toy import PERIOD, SAFE, Homing, Make, action, operator, states
from tests.recording.records import Records

WELCOME: Input = ("policy", Welcome(1, "policy", 5))
PARTS = [f"part {number}" for number in range(10)]


@pytest.fixture
def robot(spec: RobotSpec) -> Homing:
    return Homing(spec)


def turn(core: Any, number: int, *inputs: Input) -> list[Phase]:
    """Make the control period that begins at ``number`` periods. Return the phases of its Steps."""
    outputs = core.step(inputs, number * PERIOD)
    return [Phase(message.phase[0]) for _, message in outputs if isinstance(message, Step)]


def begin(core: Any, robot: Homing) -> None:
    """Take the core to the first part of its first reset, in period 2."""
    assert turn(core, 0, WELCOME) == [Phase.FIRST]
    core.step([action(0, 1.5, 0)], 0.005)
    assert turn(core, 1) == [Phase.TRUNCATED]
    robot.events.clear()
    assert turn(core, 2) == []
    assert robot.events == ["command", "part 0"]  # the command is the safe action


@pytest.mark.parametrize("deadline", [50, None])
def test_the_driver_makes_one_part_per_control_period(make_core: Make, robot: Homing, deadline: float | None) -> None:
    """The reset takes 200 ms, longer than the action deadline of 50 ms. This is no fault.

    Between the parts, the driver applies no action. The last part and the first observation are in the same period.
    """
    core = make_core(SafetyConfig(safe_action={"left": 0.25}, action_deadline_ms=deadline), welcomed=False)
    begin(core, robot)
    for number in range(3, 12):
        assert turn(core, number) == []
        assert turn(core, number) == []  # a second turn in the same period
    assert turn(core, 12) == [Phase.FIRST]
    assert robot.events[:12] == ["command", *PARTS, "end"]
    core.step([action(2, 1.5, 0)], 12.5 * PERIOD)
    assert turn(core, 13) == [Phase.MID]
    assert (core.guard.lifecycle.active, robot.applied[-1]) == (True, [1.5, 0])
    assert (core.counters["observations_refused"], core.counters["overruns"]) == (0, 0)


def test_after_a_reset_the_deadline_of_the_first_action_holds(make_core: Make, robot: Homing) -> None:
    """The last part ends at 240 ms. The deadline of 50 ms begins with the next turn at 260 ms, and ends at 310 ms."""
    core = make_core(welcomed=False)
    begin(core, robot)
    for number in range(3, 16):
        turn(core, number)
        assert core.guard.lifecycle.active
    assert states(core.step([], 16 * PERIOD)) == ["fault"]


@pytest.mark.parametrize("verb", ["estop", "deactivate", "shutdown"])
def test_a_command_interrupts_the_reset_at_once(make_core: Make, robot: Homing, verb: str) -> None:
    """The command arrives between two parts. The robot cleans up, then it gets the safe action."""
    core = make_core(welcomed=False)
    begin(core, robot)
    turn(core, 3)
    core.step([operator(verb)], 3.5 * PERIOD)
    assert robot.events == ["command", "part 0", "part 1", "interrupted", "command"]
    assert robot.applied[-1] == [0.25, 0]
    assert turn(core, 4) == [Phase.FIRST]
    for number in range(5, 20):
        turn(core, number)
    assert (robot.events.count("part 0"), robot.applied[-1]) == (1, [0.25, 0])


def test_a_command_in_the_turn_of_a_part_prevents_the_part(make_core: Make, robot: Homing) -> None:
    core = make_core(welcomed=False)
    begin(core, robot)
    assert turn(core, 3, operator("estop")) == [Phase.FIRST]
    assert robot.events[:4] == ["command", "part 0", "interrupted", "command"]
    assert "part 1" not in robot.events


@pytest.mark.parametrize(
    "inputs",
    [
        [operator("estop"), operator("reset"), operator("activate")],
        [operator("deactivate"), operator("activate")],
        [WELCOME, operator("activate")],
    ],
)
def test_a_cause_that_ends_in_the_same_turn_still_interrupts_the_reset(
    make_core: Make, robot: Homing, inputs: list[Input]
) -> None:
    """All these messages can arrive during one long part. The robot begins a new reset, from its safe action."""
    core = make_core(welcomed=False)
    begin(core, robot)
    turn(core, 3)
    turn(core, 4, *inputs)
    assert robot.events == ["command", "part 0", "part 1", "interrupted", "command", "part 0"]


def test_a_server_that_falls_silent_after_a_heartbeat_interrupts_the_reset(make_core: Make, robot: Homing) -> None:
    """The server sends the Heartbeat while it checks whether another driver is alive. Then it is silent for 0.5 s."""
    core = make_core(welcomed=False)
    begin(core, robot)
    core.step([("policy", Heartbeat(0, 5))], 2.5 * PERIOD)
    assert "interrupted" not in robot.events
    core.step([], 0.6)
    assert robot.events == ["command", "part 0", "interrupted", "command"]


def test_after_an_interrupted_reset_an_activate_begins_a_new_reset(make_core: Make, robot: Homing) -> None:
    core = make_core(welcomed=False)
    begin(core, robot)
    core.step([operator("estop"), operator("reset")], 2.5 * PERIOD)
    turn(core, 3)
    robot.events.clear()
    core.step([operator("activate")], 3.5 * PERIOD)
    phases = [phase for number in range(4, 16) for phase in turn(core, number)]
    assert phases == [Phase.TRUNCATED, Phase.FIRST]
    assert [event for event in robot.events if event != "command"] == [*PARTS, "end"]


def test_the_welcome_of_another_server_interrupts_the_reset(make_core: Make, robot: Homing) -> None:
    """An emergency stop can be in force at this server."""
    core = make_core(welcomed=False)
    begin(core, robot)
    core.step([("policy", Welcome(1, "policy", 6))], 2.5 * PERIOD)
    assert turn(core, 3) == [Phase.FIRST]
    assert robot.events[:4] == ["command", "part 0", "interrupted", "command"]


def test_a_reset_that_lasts_too_long_is_a_fault(make_core: Make, robot: Homing) -> None:
    """The reset begins at 40 ms, and may last 100 ms. The part at 160 ms is the first that ends later."""
    core = make_core(replace(SAFE, reset_timeout_ms=100), welcomed=False)
    begin(core, robot)
    for number in range(3, 8):
        turn(core, number)
    assert core.guard.lifecycle.active
    assert states(core.step([], 8 * PERIOD)) == ["fault"]
    assert core.guard.lifecycle.reason == "the reset has lasted longer than 100 ms"
    assert robot.events[-2:] == ["interrupted", "command"]


def test_without_an_action_deadline_a_reset_has_no_limit(make_core: Make, robot: Homing) -> None:
    core = make_core(SafetyConfig(reset_timeout_ms=100), welcomed=False)
    begin(core, robot)
    for number in range(3, 12):
        turn(core, number)
    assert turn(core, 12) == [Phase.FIRST]


def test_a_late_turn_or_a_long_part_causes_no_fault(make_core: Make, robot: Homing) -> None:
    """Between two parts, the driver makes no turn for 400 ms. The action deadline of 50 ms holds only after the reset.

    The rate of the loop does not count this time.
    """
    core = make_core(welcomed=False)
    begin(core, robot)
    for number in range(23, 32):
        assert turn(core, number) == []
    assert turn(core, 32) == [Phase.FIRST]
    assert core.guard.lifecycle.active
    for number in range(33, 300):
        core.step([action(core.next_sequence - 1, 1.5, 0)], (number - 0.5) * PERIOD)
        turn(core, number)
    assert core.guard.lifecycle.active
    assert core.figures()["missed_share"] == 0


def test_a_reset_repairs_sensor_and_motors_in_its_last_part(make_core: Make, robot: Homing) -> None:
    """Before the reset, the sensor and the motors fail. During the reset, this is no fault."""
    core = make_core(welcomed=False)
    begin(core, robot)
    for number in range(3, 13):
        turn(core, number)
    good, robot.sees, robot.motor = robot.sees, OSError("encoder lost"), OSError("motors are off")

    def repair(number: int) -> None:
        if number == 9:
            robot.sees, robot.motor = good, None

    robot.on_part = repair
    core.step([], 13 * PERIOD)
    assert not core.guard.lifecycle.active
    core.step([operator("activate")], 13.5 * PERIOD)
    phases = [phase for number in range(14, 25) for phase in turn(core, number)]
    assert (phases, core.guard.lifecycle.active) == ([Phase.FIRST], True)


def test_the_end_of_the_driver_interrupts_the_reset(make_core: Make, robot: Homing) -> None:
    core = make_core(welcomed=False)
    begin(core, robot)
    core.make_safe()
    assert robot.events == ["command", "part 0", "interrupted", "command"]


def fail(number: int) -> None:
    if number == 3:
        raise OSError("no homing switch")


def test_an_exception_in_a_part_is_a_fault_and_ends_the_reset(make_core: Make, robot: Homing) -> None:
    core = make_core(welcomed=False)
    robot.on_part = fail
    begin(core, robot)
    for number in (3, 4):
        turn(core, number)
    assert states(core.step([], 5 * PERIOD)) == ["fault"]
    assert core.guard.lifecycle.reason == "reset: OSError: no homing switch"
    assert robot.events == ["command", *PARTS[:4], "command"]
    assert robot.applied[-1] == [0.25, 0]
    robot.on_part = lambda _: None
    core.step([operator("activate")], 5.5 * PERIOD)
    for number in range(6, 20):
        turn(core, number)
    assert robot.events.count("end") == 1


def test_an_emergency_stop_of_a_part_stops_all_robots(make_core: Make, robot: Homing) -> None:
    def press(_: int) -> None:
        raise EmergencyStop("the red button")

    core = make_core(welcomed=False)
    robot.on_part = press
    assert turn(core, 0, WELCOME) == [Phase.FIRST]
    core.step([action(0, 1.5, 0)], 0.005)
    turn(core, 1)
    stops = [message for _, message in core.step([], 2 * PERIOD) if message.NAME == "command"]
    assert [(stop.verb, stop.reason) for stop in stops] == [("estop", "leg: the red button")]  # type: ignore[attr-defined]
    assert (core.guard.lifecycle.stopped, robot.applied[-1]) == (True, [0.25, 0])


def test_a_robot_that_fails_to_clean_up_is_in_fault(make_core: Make, robot: Homing) -> None:
    def stubborn() -> Any:
        try:
            while True:
                yield
        finally:
            raise OSError("brake")

    robot.reset = stubborn  # type: ignore[method-assign]
    core = make_core(welcomed=False)
    assert turn(core, 0, WELCOME) == [Phase.FIRST]
    core.step([action(0, 1.5, 0)], 0.005)
    turn(core, 1)
    turn(core, 2)
    assert (core.body.resetting, core.body.problem) == (True, "")
    core.step([WELCOME], 2.5 * PERIOD)
    assert not core.body.resetting
    assert core.guard.lifecycle.reason == "reset: OSError: brake"
    assert robot.applied[-1] == [0.25, 0]


def test_a_reset_can_return_any_iterator(robot: Homing) -> None:
    first = robot.reset
    robot.reset = lambda: itertools.chain(first(), first())  # type: ignore[method-assign]
    body = RobotBody(robot)
    steps = [body.step(body.commanded) for _ in range(21)]
    assert (steps, robot.events) == ([None] * 20 + [0], [*PARTS, "end"] * 2)


@pytest.mark.parametrize("where", ["part", "cleanup"])
def test_a_part_or_a_cleanup_that_hangs_ends_the_driver(
    robot: Homing, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The robot hangs until the watch gives up. Without the watch, the test would not end."""
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def hang() -> Iterator[None]:
        try:
            if where == "part":
                ended.wait()
            yield
        finally:
            ended.wait()

    body = RobotBody(robot)
    monkeypatch.setattr(body, "_hang", HangWatch(0.05, None, end))
    robot.reset = hang  # type: ignore[method-assign, assignment]
    assert body.step(body.commanded) is None
    body.command(body.commanded)
    assert codes == [EXIT_HUNG]


def recorded(body: Any) -> tuple[RecordedCore, Records]:
    records, body = Records(), RecordedBody(body)
    guard = Guard(body.spec, "leg", SAFE)
    core = SourceCore(
        body, "leg", 2, lockstep=False, pacing=RealTime(body.spec, "hold"), guard=guard, learner=False, driver=True
    )
    return RecordedCore(core, records, body.observe), records


def test_a_replay_repeats_the_reset(robot: Homing, spec: RobotSpec) -> None:
    """The recording contains a reset that an operator interrupts, and a complete reset."""
    turns: list[tuple[list[Input], float]] = [([WELCOME], 0.0), ([action(0, 1.5, 0)], 0.005), ([], 0.02), ([], 0.04)]
    turns += [([], 0.06), ([operator("estop")], 0.07), ([], 0.071)]
    turns += [([operator("reset")], 0.072), ([], 0.08), ([operator("activate")], 0.09)]
    turns += [([], number * PERIOD) for number in range(5, 17)]
    core, records = recorded(RobotBody(robot))
    outputs = [core.step(inputs, now) for inputs, now in turns]
    assert robot.events.count("interrupted") == robot.events.count("end") == 1
    assert {2} < {report.refused for report in records.messages if isinstance(report, RobotReport)}
    kept: dict[str, list[Any]] = {
        Step.NAME: [(None, it, 0) for turn in outputs for _, it in turn if isinstance(it, Step)],
        RobotReport.NAME: [(None, it, 0) for it in records.messages if isinstance(it, RobotReport)],
    }
    again, repeated = recorded(ReplayedBody(spec, kept))
    outputs_again = [again.step(inputs, now) for inputs, now in turns]
    assert [encoded(turn) for turn in outputs_again] == [encoded(turn) for turn in outputs]
    assert list(map(codec.encode, repeated.messages)) == list(map(codec.encode, records.messages))
    assert any(isinstance(it, MotorCommand) for it in records.messages)


def encoded(outputs: Sequence[Output]) -> list[tuple[Any, bytes]]:
    return [(to, codec.encode(message)) for to, message in outputs]
