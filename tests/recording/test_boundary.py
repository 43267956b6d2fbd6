"""RecordedCore records the inputs of each turn, and the outputs that ``step`` does not return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from td3_robot.bundle import Bundle
from td3_robot.core_types import Input, Peer
from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import RealTime
from td3_robot.driver.robot import EmergencyStop, Robot, RobotBody
from td3_robot.messages import (
    Action,
    Latches,
    LifecycleChange,
    MotorCommand,
    RobotReport,
    Step,
    Turn,
    Welcome,
)
from td3_robot.policy.core import PolicyCore
from td3_robot.recording.boundary import PolicyObserver, RecordedBody, RecordedCore
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.specs import Float32, RobotSpec
from td3_robot.transport.link import hello
from tests.policy.served_robot import command, leg
from tests.recording.records import Records

SAFE = SafetyConfig(observation_deadline_ms=100)


@pytest.fixture
def operator() -> Peer:
    return Peer("policy", b"2", hello("operator", "op", client=2), {})


def recorded_policy(core: PolicyCore) -> tuple[RecordedCore, Records]:
    records = Records()
    return RecordedCore(core, records, PolicyObserver(core)), records


def test_state_changes_are_recorded_when_no_operator_is_connected() -> None:
    core, records = recorded_policy(PolicyCore(seed=9))
    assert core.step([], 1.0) == []
    assert [change.state for change in records.take(LifecycleChange)] == ["inactive", "active"]
    core.step([], 2.0)
    assert records.take(LifecycleChange) == []


def test_a_state_change_that_a_link_sends_to_an_operator_is_not_recorded_again(operator: Peer) -> None:
    """The bus already records every message that it sends on a link, except Heartbeats."""
    core, records = recorded_policy(PolicyCore(seed=9))
    core.step([(operator, operator.hello)], 1.0)
    records.take()
    outputs = core.step([(operator, command("estop"))], 2.0)
    assert [to for to, message in outputs if isinstance(message, LifecycleChange)] == [operator]
    assert records.take(LifecycleChange) == []


def test_latches_are_recorded_when_they_change(
    spec: RobotSpec, operator: Peer, make_bundle: Callable[..., Bundle], make_step: Callable[..., Step]
) -> None:
    peer, policy = leg(spec), PolicyCore(9, safety=SAFE)
    policy.load(1, make_bundle(1))
    policy.resume(SafetyState(stopped=("arm",)), 0.0)
    core, records = recorded_policy(policy)

    def latches(*inputs: Input) -> list[dict[str, Any]]:
        core.step(inputs, 0.0)
        return [message.latches for message in records.take(Latches)]

    arm = {**SafetyState().plain(), "stopped": ["arm"]}
    assert latches((peer, peer.hello), (peer, make_step(1)), (operator, operator.hello)) == [arm]  # the restored state
    assert latches((operator, command("state"))) == []
    assert latches((operator, command("freeze"))) == [{**arm, "frozen": True}]
    assert latches((operator, command("freeze"))) == []
    assert latches((operator, command("unfreeze"))) == [arm]


def test_a_turn_is_recorded_before_the_core_runs() -> None:
    class Crashing:
        def step(self, inputs: Sequence[Input], now: float) -> Any:
            del inputs, now
            raise ValueError("a mistake")

    records = Records()
    with pytest.raises(ValueError, match="a mistake"):
        RecordedCore(Crashing(), records).step([("learner", Welcome(1, "learner", 5))], 1.5)
    [turn] = records.messages
    assert isinstance(turn, Turn)
    assert (turn.now, [item[1] for item in turn.inputs]) == (1.5, ["welcome"])


class Leg(Robot):
    """A robot whose ``observe`` raises the error that the test sets."""

    def __init__(self, spec: RobotSpec) -> None:
        self.spec = spec
        self.error: Exception | None = None

    def observe(self) -> Float32:
        if self.error:
            raise self.error
        return np.array([1, 2, 3], np.float32)

    def apply(self, action: Float32) -> None:
        del action


Driver = tuple[RecordedCore, Records, Leg]


@pytest.fixture
def driver(spec: RobotSpec) -> Driver:
    """A driver that has received its Welcome at 0.0 s and has published Step 0."""
    robot, records = Leg(spec), Records()
    body: Any = RecordedBody(RobotBody(robot))
    guard = Guard(spec, "leg", SafetyConfig(safe_action={"left": 0.25}), autostart=True)
    pacing = RealTime(spec, "hold")
    core = SourceCore(body, "leg", 2, lockstep=False, pacing=pacing, guard=guard, learner=False, driver=True)
    recorded = RecordedCore(core, records, body.observe)
    recorded.step([("policy", Welcome(1, "policy", 5))], 0.0)
    return recorded, records, robot


def test_the_applied_action_is_recorded_with_the_next_step_number_and_the_time(driver: Driver) -> None:
    core, records, _ = driver
    records.take()
    action = Action("leg", 2, 0, 0, np.array([[1.5, -0.25]], np.float32), 7, 0, 0)
    assert core.step([("policy", action)], 0.003) == []
    [command_sent] = records.take(MotorCommand)
    assert (command_sent.step, command_sent.stamp, command_sent.action.tolist()) == (1, 3_000_000, [1.5, -0.25])


def test_reports_of_the_robot_are_recorded_when_they_change(driver: Driver) -> None:
    """Calls 1 and 2 to the robot are ``apply`` and ``observe`` at 0.0 s.

    Call 3 is ``observe``, which raises EmergencyStop. Call 4 is ``apply`` with the safe action.
    """
    core, records, robot = driver
    assert records.take(RobotReport) == []
    robot.error = EmergencyStop("the red button")
    core.step([], 0.02)
    reports = [(it.call, it.refused, it.trouble, it.stop) for it in records.take(RobotReport)]
    assert reports == [(3, 0, "", "the red button"), (4, 0, "", "")]
    robot.error = OSError("no answer")
    for number in range(2, 5):
        core.step([], number * 0.02)
    [trouble] = records.take(RobotReport)
    assert (trouble.refused, trouble.trouble, trouble.stop) == (1, "observe: OSError: no answer", "")
