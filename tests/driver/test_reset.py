"""When the driver calls the robot's ``reset``, which may move the robot."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from td3_robot.driver.core import SourceCore
from td3_robot.driver.robot import EmergencyStop
from td3_robot.messages import ActionOrigin, Phase, Step, Welcome
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from tests.driver.toy import PERIOD, SAFE, Make, Resettable, action, one, operator, states

WELCOME = ("policy", Welcome(1, "policy", 5))


@pytest.fixture
def robot(spec: RobotSpec) -> Resettable:
    return Resettable(spec)


def begin(core: SourceCore) -> None:
    """Take the core to the first episode with a reset. This episode begins at 0.0 s, with Step 2.

    The control periods begin 10 µs earlier than multiples of 20 ms, so that rounding errors of the times do no harm.
    """
    assert one(core.step([WELCOME], -0.04001)).phase[0] == Phase.FIRST
    core.step([action(0, 1.5, 0)], -0.037)
    assert one(core.step([], -0.02)).phase[0] == Phase.TRUNCATED
    assert one(core.step([], 0.0)).phase[0] == Phase.FIRST


def one_or_none(core: SourceCore, number: int) -> Step | None:
    outputs = core.step([], number * PERIOD)
    return next((message for _, message in outputs if isinstance(message, Step)), None)


def run(core: SourceCore, first: int, last: int) -> list[int]:
    """Make the periods from ``first`` to ``last``, with an Action in each. Return the phases of the Steps."""
    phases = []
    for number in range(first, last + 1):
        phases.append(int(one(core.step([], number * PERIOD)).phase[0]))
        core.step([action(core.next_sequence - 1, 1.5, 0)], number * PERIOD + 0.005)
    return phases


def test_the_robot_is_reset_at_the_end_of_an_episode(make_core: Make, robot: Resettable) -> None:
    core = make_core(welcomed=False)
    begin(core)
    assert robot.resets == 1
    core.step([action(2, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    step = one(core.step([], 0.02))
    assert (step.phase[0], step.transitions) == (Phase.TERMINATED, 2)
    before = len(robot.applied)
    core.step([action(3, 1.5, 0)], 0.03)
    assert len(robot.applied) == before  # an Action for the last Step of an episode is not applied
    robot.ends = Phase.MID
    step = one(core.step([], 0.04))
    # The robot holds the safe action.
    assert (step.phase[0], step.episode[0], step.action.tolist(), step.transitions) == (
        0,
        2,
        [[0.25, 0]],
        2,
    )
    assert robot.resets == 2
    core.step([action(4, 1.5, 0)], 5.0)  # a reset of 5 s does not count as a missed deadline
    assert robot.applied[-1] == [1.5, 0]


@pytest.mark.parametrize("deadline", [50, None])
def test_the_driver_applies_the_safe_action_before_it_resets_the_robot(
    make_core: Make, robot: Resettable, deadline: float | None
) -> None:
    at_reset: list[list[float]] = []
    robot.on_reset = lambda: at_reset.append(robot.applied[-1])
    core = make_core(SafetyConfig(safe_action={"left": 0.25}, action_deadline_ms=deadline), welcomed=False)
    begin(core)
    core.step([action(2, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    core.step([], 0.02)
    robot.ends = Phase.MID
    assert one(core.step([], 0.04)).phase[0] == Phase.FIRST
    assert at_reset == [[0.25, 0], [0.25, 0]]  # before the first episode, and between the first and the second
    assert robot.applied[-1] == [0.25, 0]


def test_before_the_first_answer_of_the_server_no_reset_moves_the_robot(make_core: Make, robot: Resettable) -> None:
    """The server sends an emergency stop that is in force before its first answer."""
    core = make_core()
    for number in range(1, 50):
        step = one(core.step([], number * PERIOD))
        assert (step.phase[0], step.origin) == (Phase.MID, ActionOrigin.SAFE)
    core.step([operator("estop"), action(49, 1.5, 0)], 0.99)
    assert set(run(core, 50, 60)) == {Phase.MID}
    assert (robot.resets, robot.applied) == (0, [[0.25, 0]] * len(robot.applied))


def test_after_a_restart_of_the_server_a_reset_waits_for_an_answer(make_core: Make, robot: Resettable) -> None:
    core = make_core(welcomed=False)
    begin(core)
    core.step([action(2, 1.5, 0)], 0.003)
    core.step([("policy", Welcome(1, "policy", 6))], 0.01)
    robot.ends = Phase.TERMINATED
    assert one(core.step([], 0.02)).phase[0] == Phase.TERMINATED
    robot.ends = Phase.MID
    assert one(core.step([], 0.04)).phase[0] == Phase.FIRST
    assert robot.resets == 1
    assert run(core, 3, 5) == [Phase.MID, Phase.TRUNCATED, Phase.FIRST]
    assert robot.resets == 2


def test_without_autostart_only_an_activate_leads_to_a_reset(make_core: Make, robot: Resettable) -> None:
    core = make_core(autostart=False)
    core.step([action(0, 1.5, 0)], 0.003)
    assert one(core.step([], 0.02)).origin == ActionOrigin.SAFE
    core.step([operator("configure"), operator("activate")], 0.03)
    core.step([action(1, 1.5, 0)], 0.031)
    step = one(core.step([], 0.04))
    assert (step.phase[0], step.origin, step.transitions) == (Phase.TRUNCATED, ActionOrigin.SAFE, 2)
    core.step([action(2, 1.5, 0)], 0.041)
    assert (robot.resets, robot.applied) == (0, [[0.25, 0]] * len(robot.applied))
    step = one(core.step([], 0.06))
    assert (step.phase[0], step.episode[0], step.action.tolist(), robot.resets) == (Phase.FIRST, 1, [[0.25, 0]], 1)
    core.step([action(3, 1.5, 0)], 0.061)
    assert robot.applied[-1] == [1.5, 0]


def test_during_an_emergency_stop_no_reset_moves_the_robot(make_core: Make, robot: Resettable) -> None:
    """After the stop, every episode ends after one period. Only an ``activate`` allows the next reset."""
    core = make_core(welcomed=False)
    begin(core)
    core.step([action(2, 1.5, 0)], 0.003)
    core.step([operator("estop")], 0.01)
    stopped = len(robot.applied)
    robot.ends = Phase.TERMINATED
    assert run(core, 1, 49) == [Phase.TERMINATED, Phase.FIRST] * 24 + [Phase.TERMINATED]
    core.step([operator("reset")], 0.99)
    assert run(core, 50, 50) == [Phase.FIRST]  # inactive
    robot.ends = Phase.MID
    assert robot.resets == 1  # before the stop
    core.step([operator("activate")], 1.01)
    assert one(core.step([], 1.02)).phase[0] == Phase.TRUNCATED
    assert one(core.step([], 1.04)).phase[0] == Phase.FIRST
    assert robot.resets == 2
    assert robot.applied[stopped - 1 :] == [[0.25, 0]] * (len(robot.applied) - stopped + 1)


def test_a_sensor_that_fails_leads_to_a_reset_only_after_an_activate(make_core: Make, robot: Resettable) -> None:
    core = make_core(welcomed=False)
    begin(core)
    good, robot.sees = robot.sees, OSError("bus off")
    assert one(core.step([], 0.02)).phase[0] == Phase.TRUNCATED
    assert core.step([], 0.04) == []
    robot.sees = good
    assert run(core, 3, 50) == [Phase.FIRST] + [Phase.MID] * 47
    assert robot.resets == 1
    core.step([operator("activate")], 1.01)
    assert run(core, 51, 53) == [Phase.TRUNCATED, Phase.FIRST, Phase.MID]
    assert robot.resets == 2
    assert robot.applied[-1] == [1.5, 0]


@pytest.mark.parametrize("recovery", ["manual", "automatic"])
def test_only_an_active_driver_repeats_a_reset_that_failed(make_core: Make, robot: Resettable, recovery: str) -> None:
    """Actions continue to arrive. With an automatic recovery, they make the driver active after each 200 ms.

    The reset at 0.04 s fails. Then 100 periods of 20 ms follow, with at most 100 · 20 / 200 = 10 recoveries.
    """
    core = make_core(replace(SAFE, recovery=recovery, recovery_ms=200), welcomed=False)
    begin(core)
    core.step([action(2, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    core.step([], 0.02)
    robot.ends = Phase.MID

    def fail() -> None:
        raise OSError("no homing switch")

    robot.on_reset = fail
    assert states(core.step([], 0.04)) == ["fault"]
    assert core.guard.lifecycle.reason == "reset: OSError: no homing switch"
    for number in range(3, 103):
        core.step([], number * PERIOD)
        core.step([action(core.next_sequence - 1, 1.5, 0)], number * PERIOD + 0.005)
    tried = robot.resets - 2
    low, high = (0, 0) if recovery == "manual" else (3, 10)
    assert low <= tried <= high
    robot.on_reset = lambda: None
    core.step([operator("activate")], 2.05)
    assert run(core, 103, 105)[-1] == Phase.MID
    assert robot.resets == tried + 3
    assert robot.applied[-1] == [1.5, 0]


@pytest.mark.parametrize("recovery", ["manual", "automatic"])
def test_a_failing_phase_leads_to_no_reset_before_an_activate(
    make_core: Make, robot: Resettable, recovery: str
) -> None:
    core = make_core(replace(SAFE, recovery=recovery, recovery_ms=200), welcomed=False)
    begin(core)
    robot.ends = "falls"  # type: ignore[assignment]
    run(core, 1, 100)
    assert "phase() or reward: ValueError" in core.guard.lifecycle.reason
    assert robot.resets == 1
    robot.ends = Phase.MID
    core.step([operator("activate")], 2.01)
    assert run(core, 101, 103) == [Phase.TRUNCATED, Phase.FIRST, Phase.MID]
    assert (robot.resets, robot.applied[-1]) == (2, [1.5, 0])


@pytest.mark.parametrize("method", ["phase", "reward"])
def test_phase_and_reward_may_need_the_first_reset(
    make_core: Make, robot: Resettable, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        if not robot.resets:
            raise AttributeError("n")

    monkeypatch.setattr(robot, method, fail)
    core = make_core(autostart=False)
    for number in range(1, 10):
        step = one(core.step([], number * PERIOD))
        assert (step.phase[0], step.reward[0]) == (Phase.MID, 0)
    assert core.body.problem == ""
    monkeypatch.undo()
    core.step([operator("configure"), operator("activate")], 0.19)
    assert run(core, 10, 12) == [Phase.TRUNCATED, Phase.FIRST, Phase.MID]
    assert (robot.resets, robot.applied[-1]) == (1, [1.5, 0])


@pytest.mark.parametrize("recovery", ["manual", "automatic"])
def test_a_bad_observation_after_a_reset_leads_to_no_second_reset(
    make_core: Make, robot: Resettable, recovery: str
) -> None:
    """The bus gives no valid value right after each reset."""
    core = make_core(replace(SAFE, recovery=recovery, recovery_ms=200), welcomed=False)
    good = robot.sees

    def unplug() -> None:
        robot.sees = OSError("bus off")

    robot.on_reset = unplug
    core.step([WELCOME], -0.04001)
    core.step([action(0, 1.5, 0)], -0.037)
    core.step([], -0.02)
    assert core.step([], 0.0)[0][1].NAME == "lifecycle"  # FAULT, and no Step
    robot.sees = good
    assert one(core.step([], 0.02)).phase[0] == Phase.FIRST
    run(core, 2, 30)
    assert core.guard.lifecycle.active == (recovery == "automatic")
    core.step([operator("activate")], 0.61)
    assert run(core, 31, 40) == [Phase.MID] * 10
    assert (robot.resets, robot.applied[-1]) == (1, [1.5, 0])


@pytest.mark.parametrize("recovery", ["manual", "automatic"])
@pytest.mark.parametrize(("when", "following"), [(0.19, 10), (0.2, 11)])
def test_an_activate_leads_to_the_reset_that_repairs_the_motors(
    make_core: Make, robot: Resettable, recovery: str, when: float, following: int
) -> None:
    """The ``activate`` comes within a control period, or in the turn that begins one."""
    robot.motor = OSError("motors are off")

    def enable() -> None:
        robot.motor = None

    robot.on_reset = enable
    core = make_core(replace(SAFE, recovery=recovery, recovery_ms=200))
    run(core, 1, 9)
    assert robot.resets == 0
    core.step([operator("activate")], when)
    run(core, following, 14)
    assert (robot.resets, core.guard.lifecycle.active, robot.applied[-1]) == (1, True, [1.5, 0])


def test_an_emergency_stop_while_the_robot_is_made_safe_prevents_the_reset(make_core: Make, robot: Resettable) -> None:
    core = make_core(welcomed=False)
    begin(core)
    core.step([action(2, 1.5, 0)], 0.003)
    robot.ends = Phase.TERMINATED
    core.step([], 0.02)
    robot.motor = EmergencyStop("the red button")
    core.step([], 0.04)
    assert core.guard.lifecycle.stopped
    assert robot.resets == 1


def test_a_reset_that_the_constructor_assigns_is_called(
    make_core: Make, robot: Resettable, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.delattr(Resettable, "reset")
    robot.reset = lambda: called.append(1)  # type: ignore[method-assign]
    begin(make_core(welcomed=False))
    assert called == [1]


def test_an_activate_allows_the_reset_that_repairs_a_sensor(make_core: Make, robot: Resettable) -> None:
    """Without a valid observation, there is no Step that the server could answer."""
    core = make_core(welcomed=False)
    begin(core)
    good, robot.sees = robot.sees, OSError("encoder lost")

    def repair() -> None:
        robot.sees = good

    robot.on_reset = repair
    core.step([], 0.02)
    core.step([("policy", Welcome(1, "policy", 6))], 0.03)
    for number in range(2, 20):
        assert one_or_none(core, number) is None
    core.step([operator("activate")], 0.39)
    assert run(core, 20, 21) == [Phase.FIRST, Phase.MID]
    assert (robot.resets, robot.applied[-1]) == (2, [1.5, 0])
