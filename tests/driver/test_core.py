"""The driver's core: which actions it applies and when, and how it handles deadlines and episodes."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from td3_robot.messages import Action, ActionOrigin, Command, Phase, Reply, Status, Step
from td3_robot.safety.limits import SafetyConfig
from tests.driver.toy import PERIOD, Make, Toy, action, one, operator, states

POLICY, HELD, SAFE_ORIGIN = ActionOrigin.POLICY, ActionOrigin.HELD, ActionOrigin.SAFE


def test_an_action_is_applied_at_once_and_reported_in_the_next_step(make_core: Make, robot: Toy) -> None:
    """The first observation is at 0.0 s. Its Action comes at 0.003 s and holds until the next Action."""
    core = make_core()
    assert robot.applied == [[0.25, 0.0]]  # the safe action, before any Action
    assert core.step([action(0, 1.5, -0.25)], 0.003) == []
    assert robot.applied[1:] == [[1.5, -0.25]]
    step = one(core.step([], 0.02))
    assert (step.sequence, step.phase[0], step.origin, step.answered, step.weights_version) == (1, 1, POLICY, 0, 7)
    assert step.action.tolist() == [[1.5, -0.25]]
    assert step.reward.tolist() == [1 + 1.5]  # the toy's reward: first observation channel + first action channel
    step = one(core.step([], 0.04))  # no Action for Step 1 yet: the motors hold the action for Step 0
    assert (step.origin, step.weights_version, step.action.tolist()) == (HELD, 0, [[1.5, -0.25]])
    assert len(robot.applied) == 2
    assert core.step([action(0, 2.0, 0.0), action(1, 2.0, 0.0)], 0.041) == []  # both are late and are not applied
    assert len(robot.applied) == 2
    assert core.counters["late_actions"] == 2


def test_a_held_action_of_an_operator_belongs_to_the_operator(make_core: Make) -> None:
    """The Action for Step 0 is from the operator Ann. Steps 1 and 2 get no Action.

    At Step 3 Ann has given the robot back, so the policy's Action names no operator.
    """
    core = make_core(SafetyConfig())
    link, first = action(0, 1.5, -0.25, version=0)
    core.step([(link, replace(first, operated={"0": "ann"}))], 0.003)
    step = one(core.step([], 0.02))
    assert (step.origin, step.operated) == (ActionOrigin.OPERATOR, {"0": "ann"})
    for now in (0.04, 0.06):
        step = one(core.step([], now))
        assert (step.origin, step.operated, step.action.tolist()) == (HELD, {"0": "ann"}, [[1.5, -0.25]])
        assert step.origin_of(0) == HELD
    core.step([action(3, 1.0, 0.0)], 0.063)
    for now, origin in ((0.08, POLICY), (0.1, HELD)):
        step = one(core.step([], now))
        assert (step.origin, step.operated) == (origin, {})


def test_a_safe_action_of_the_server_overrides_the_action_of_the_policy(make_core: Make, robot: Toy) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0), action(0, -0.5, 0.125, version=0)], 0.003)
    assert robot.applied[-1] == [-0.5, 0.125]
    step = one(core.step([], 0.02))
    assert (step.origin, step.weights_version, step.answered) == (SAFE_ORIGIN, 0, 1)
    assert core.guard.lifecycle.active  # the server's safe action is not a fault of the driver


def test_a_second_answer_of_the_policy_to_the_same_step_is_ignored(make_core: Make, robot: Toy) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0), action(0, -0.5, 0.125)], 0.003)
    assert robot.applied[-1] == [1.5, 0.0]


def test_the_driver_always_applies_its_own_limits(make_core: Make, robot: Toy) -> None:
    core = make_core(SafetyConfig(limits={"left": (-0.5, 1.0)}))
    core.step([action(0, 2.5, 0.5)], 0.003)
    assert robot.applied[-1] == [1.0, 0.5]
    assert one(core.step([], 0.02)).action.tolist() == [[1.0, 0.5]]


def test_in_a_fault_the_last_action_holds_if_no_safe_action_is_set(make_core: Make, robot: Toy) -> None:
    core = make_core(SafetyConfig(action_deadline_ms=50))
    assert robot.applied == [[0, 0]]
    core.step([action(0, 1.5, 0.25)], 0.003)
    core.step([], 0.06)
    assert core.guard.lifecycle.state == "fault"
    assert robot.applied[-1] == [1.5, 0.25]


def test_a_robot_without_safety_settings_keeps_the_limits_of_its_specification(make_core: Make, robot: Toy) -> None:
    """The channels allow [-1, 3] and [-0.5, 0.5]. An action within these ranges keeps its bits, even -0.0."""
    core = make_core(SafetyConfig())
    core.step([action(0, 1e9, -1e9)], 0.003)
    assert robot.applied[-1] == [3.0, -0.5]
    assert one(core.step([], 0.02)).action.tolist() == [[3.0, -0.5]]
    assert core.guard.counters["actions_clipped"] == 1
    inside = np.array([[-0.0, 0.1]], np.float32)
    core.step([("policy", Action("leg", 2, 1, 0, inside, 7, 0, 0))], 0.023)
    assert np.array([robot.applied[-1]], np.float32).tobytes() == inside.tobytes()


def test_an_action_beyond_a_limit_stops_the_robot_if_the_configuration_says_so(make_core: Make, robot: Toy) -> None:
    core = make_core(SafetyConfig(limits={"left": (0.0, 1.0)}, out_of_limit="stop", safe_action={"left": 0.5}))
    core.step([action(0, 0.75, 0.25)], 0.003)
    assert robot.applied[-1] == [0.75, 0.25]
    core.step([], 0.02)
    outputs = core.step([action(1, 1.25, 0.25)], 0.023)
    assert robot.applied[-1] == [0.5, 0.0]
    assert states(outputs) == ["fault"]
    assert core.guard.lifecycle.stopped
    core.step([operator("activate")], 0.025)  # refused: only a reset ends the stop
    assert one(core.step([], 0.04)).origin == ActionOrigin.SAFE


def test_without_autostart_the_driver_publishes_steps_and_holds_the_safe_action(make_core: Make, robot: Toy) -> None:
    core = make_core(autostart=False)
    core.step([action(0, 1.5, 0)], 0.003)
    assert one(core.step([], 0.02)).origin == SAFE_ORIGIN
    core.step([operator("configure"), operator("activate")], 0.03)
    core.step([action(1, 1.5, 0)], 0.031)
    assert robot.applied[-1] == [1.5, 0]


def test_a_shutdown_ends_the_driver(make_core: Make, robot: Toy) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([operator("shutdown")], 0.01)
    assert core.guard.finished
    assert robot.applied[-1] == [0.25, 0]


def test_a_learner_gets_the_same_steps_as_the_policy_server(make_core: Make) -> None:
    core = make_core(learner=True)
    outputs = core.step([action(0, 1.5, 0)], 0.02)
    steps = {to: message for to, message in outputs if isinstance(message, Step)}
    assert list(steps) == ["policy", "learner"]
    assert steps["policy"] is steps["learner"]


def test_the_action_deadline_is_checked_between_two_steps(make_core: Make, robot: Toy) -> None:
    """The Action comes at 0.003 s and the deadline is 50 ms. The fault is after 0.053 s, before the Step at 0.06 s."""
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    for now in (0.02, 0.04):
        core.step([], now)
    assert core.due == pytest.approx(0.053)
    assert core.step([], 0.0529) == []
    assert robot.applied[-1] == [1.5, 0]
    outputs = core.step([], 0.0531)
    assert states(outputs) == ["fault"]
    assert robot.applied[-1] == [0.25, 0]
    step = one(core.step([], 0.06))
    assert (step.origin, step.action.tolist(), step.weights_version) == (SAFE_ORIGIN, [[0.25, 0]], 0)
    before = len(robot.applied)
    for number in range(4, 50):  # Actions come again, but the driver does not apply them
        core.step([action(number - 1, 1.5, 0)], number * PERIOD - 0.01)
        assert one(core.step([], number * PERIOD)).origin == SAFE_ORIGIN
    assert robot.applied[before:] == [[0.25, 0]] * 46  # once a period
    assert core.guard.counters["actions_ignored"] == 46
    outputs = core.step([operator("activate")], 0.99)
    [reply] = [message for _, message in outputs if isinstance(message, Reply)]
    assert (reply.id, reply.state, reply.error) == (5, "active", "")
    core.step([action(49, 1.25, 0)], 0.995)
    assert robot.applied[-1] == [1.25, 0]


def test_the_driver_recovers_automatically_after_the_recovery_time(make_core: Make, robot: Toy) -> None:
    """Recovery needs Actions for 39 ms. They come every 20 ms from 0.065 s.

    So the first Action that the driver applies again comes at 0.105 s.
    """
    core = make_core(SafetyConfig(action_deadline_ms=50, recovery="automatic", recovery_ms=39, safe_action="zero"))
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([], 0.02)
    assert states(core.step([], 0.061)) == ["fault"]  # this turn also publishes Step 2
    applied = []
    for number in range(3, 8):
        core.step([action(number - 1, 1.5, 0)], number * PERIOD + 0.005)
        core.step([], (number + 1) * PERIOD)
        applied.append(robot.applied[-1])
    assert applied == [[0, 0], [0, 0], [1.5, 0], [1.5, 0], [1.5, 0]]


def test_a_server_that_dies_during_a_reset_is_noticed(make_core: Make, robot: Toy) -> None:
    """The reset ends at 5.0 s. Then the deadline of 50 ms starts."""
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    core.step([], 0.02)
    robot.ends = Phase.MID
    core.step([], 0.04)
    assert core.due == float("-inf")  # the next turn is at once, so that the deadline starts at the end of the reset
    core.step([], 5.0)
    assert core.due == pytest.approx(5.02)  # the next period; the deadline is at 5.05
    assert core.guard.lifecycle.active
    assert one(core.step([], 5.0201)).origin == SAFE_ORIGIN
    core.step([], 5.0501)
    assert core.guard.lifecycle.state == "fault"
    newest = one(core.step([], 5.0601)).sequence
    core.step([action(newest, 1.5, 0)], 5.061)  # not applied: the driver has not been activated since the fault
    assert robot.applied[-1] == [0.25, 0]


def test_the_command_reset_does_not_change_the_deadline_of_an_active_driver(make_core: Make) -> None:
    core = make_core()
    core.step([action(0, 1.5, 0)], 0.003)
    core.step([operator("reset")], 0.01)
    core.step([], 0.02)
    core.step([], 0.0531)
    assert core.guard.lifecycle.state == "fault"


def test_a_reply_contains_the_loop_rate_that_the_node_measured(make_core: Make) -> None:
    core = make_core()
    asked = Command(5, "", "state", "", 0, "", b"")
    [reply] = [message for _, message in core.step([("policy", asked)], 0.001) if isinstance(message, Reply)]
    assert "loop" not in reply.detail
    status = Status("leg", "running", "", {"rate_hz": 50.0}, {})
    outputs = core.step([("leg", status), ("policy", asked)], 0.002)
    [reply] = [message for _, message in outputs if isinstance(message, Reply)]
    assert reply.detail["loop"] == {"rate_hz": 50.0}


def test_the_time_of_a_reset_does_not_count_as_missed_deadlines(make_core: Make, robot: Toy) -> None:
    """The reset lasts from 0.04 s to 2.041 s, so 100 deadlines pass. The next Step is for the last of them.

    The other 99 are overruns. ``missed_share`` does not count the overruns of a reset.
    """
    core = make_core()
    robot.ends = Phase.TERMINATED
    core.step([], 0.02)
    robot.ends = Phase.MID
    core.step([], 0.04)  # this turn resets the robot
    for number in range(252):  # 5 s
        core.step([], 2.041 + number * PERIOD)
    assert core.counters["overruns"] == 99
    figures = core.figures()
    assert figures["missed_share"] == 0
    assert figures["rate_hz"] == pytest.approx(50.0)
