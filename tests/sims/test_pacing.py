"""Real time: deadlines do not drift, and a fallback replaces a missing Action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from td3_robot_sims import simulator
from td3_robot_sims.vector_env import VectorEnvironment

from td3_robot.config.schema import Config, PacingConfig
from td3_robot.core_types import Output
from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import RealTime
from td3_robot.messages import Action, ActionOrigin, Command, Message, Phase, Step, Throttle, Welcome
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Channel, RobotSpec
from td3_robot.topics import QUEUE_LENGTH

PERIOD = 0.02  # s, of the toy robot


@pytest.fixture
def make_core(scripted: Callable[..., Any], spec: RobotSpec) -> Callable[..., SourceCore]:
    def make(fallback: str = "hold", length: int = 100) -> SourceCore:
        envs = VectorEnvironment(lambda _: scripted([(length, True, False)]), 1, 0, "sim-0", 2)
        return SourceCore(envs, "sim-0", 2, lockstep=False, pacing=RealTime(spec, fallback))

    return make


def action(answers: int, *values: float) -> tuple[str, Message]:
    return "policy", Action("sim-0", 2, answers, 0, np.array([values], np.float32), 7, 1, 99)


THROTTLE: tuple[str, Message] = ("learner", Throttle("sim-0", 2, 0, 0, 0, 0))  # allows no transitions


def one(outputs: list[Output]) -> Step:
    [step] = [message for to, message in outputs if to == "learner" and isinstance(message, Step)]
    assert ("policy", step) in outputs
    return step


def test_late_steps_shift_no_deadline(spec: RobotSpec) -> None:
    """The period is 0.02 s. The step at 10.045 s is 5 ms late.

    The step for 10.06 s comes at 10.105 s, so the deadlines 10.08 s and 10.10 s pass without a step.
    """
    pacing = RealTime(spec, "hold")
    assert pacing.deadline is None
    assert pacing.may_step(10.0)
    rows = []
    for now in (10.0, 10.02, 10.045, 10.105, 10.12):
        rows.append((pacing.stepped(now), round(pacing.deadline or 0, 9)))
    assert rows == [(0, 10.02), (0, 10.04), (0, 10.06), (2, 10.12), (0, 10.14)]
    assert not pacing.may_step(10.1399)
    assert pacing.may_step(10.1401)
    figures = pacing.figures()
    assert figures["lag_max_s"] == pytest.approx(0.045)
    assert figures["lag_mean_s"] == pytest.approx((0 + 0.005 + 0.045 + 0) / 4)


def test_deadlines_do_not_drift(spec: RobotSpec) -> None:
    """Each of a million steps is 3 ms late."""
    pacing = RealTime(spec, "hold")
    pacing.stepped(1000.0)
    for _ in range(1_000_000):
        assert pacing.deadline is not None
        assert pacing.stepped(pacing.deadline + 0.003) == 0
    assert pacing.deadline == 1000.0 + 1_000_001 * PERIOD


def test_an_action_is_applied_at_the_deadline_and_not_before(make_core: Callable[..., SourceCore]) -> None:
    core = make_core()
    assert core.step([], 0.5) == []  # the core starts when it gets the learner's first Throttle
    first = one(core.step([THROTTLE], 1.0))
    assert (first.sequence, first.phase[0], first.origin) == (0, Phase.FIRST, ActionOrigin.NONE)
    assert core.pacing
    assert core.pacing.deadline == pytest.approx(1.02)
    assert core.step([action(0, 0.25, 0.125)], 1.01) == []
    second = one(core.step([], 1.02))
    assert (second.origin, second.answered, second.weights_version, second.noise_seed) == (1, 0, 7, 99)
    assert second.action.tolist() == [[0.25, 0.125]]
    assert not core.counters["overruns"]


@pytest.mark.parametrize(
    ("fallback", "origin", "applied"), [("hold", ActionOrigin.HELD, [2.5, 0.25]), ("zero", ActionOrigin.ZERO, [0, 0])]
)
def test_without_an_action_the_fallback_is_applied_and_reported(
    make_core: Callable[..., SourceCore], fallback: str, origin: ActionOrigin, applied: list[float]
) -> None:
    core = make_core(fallback)
    core.step([THROTTLE], 1.0)
    one(core.step([action(0, 2.5, 0.25)], 1.02))
    for number in (2, 3):
        step = one(core.step([], 1.0 + number * PERIOD))
        assert (step.sequence, step.origin, step.answered) == (number, origin, number)
        assert (step.weights_version, step.noise_kind, step.noise_seed) == (0, 0, 0)
        assert step.action.tolist() == [applied]
    assert core.counters[f"actions_{origin.name.lower()}"] == 2
    # The Action for Step 2 arrives after Step 3, which is too late.
    assert core.step([action(2, 1, 0)], 1.07) == []
    assert core.counters["late_actions"] == 1
    assert one(core.step([action(3, 1.5, 0)], 1.08)).action.tolist() == [[1.5, 0]]


def test_the_hold_fallback_does_not_keep_an_action_across_a_reset(make_core: Callable[..., SourceCore]) -> None:
    """Each episode has one step. The first ends at 1.02 s, and the reset is at 1.04 s. At 1.06 s, the action is 0."""
    core = make_core(length=1)
    core.step([THROTTLE], 1.0)
    steps = [one(core.step([action(0, 2.5, 0.25)], 1.02)), one(core.step([], 1.04)), one(core.step([], 1.06))]
    assert [step.phase[0] for step in steps] == [Phase.TERMINATED, Phase.FIRST, Phase.TERMINATED]
    assert [step.origin for step in steps] == [ActionOrigin.POLICY, ActionOrigin.NONE, ActionOrigin.HELD]
    assert steps[2].action.tolist() == [[0, 0]]
    assert core.counters["actions_held"] == 1


def test_the_zero_fallback_is_clipped_to_the_action_limits() -> None:
    channels = (Channel("a", "N", 0.5, 3.0), Channel("b", "N", -3.0, -1.0), Channel("c", "N", -1.0, 1.0))
    pacing = RealTime(RobotSpec("Odd", (Channel("o", "m", 0, 1),), channels, 0.1), "zero")
    applied, origin = pacing.substitute(np.ones((2, 3), np.float32))
    assert applied.tolist() == [[0.5, -1, 0]] * 2
    assert applied.dtype == np.float32
    assert origin is ActionOrigin.ZERO


def test_a_slow_learner_delays_no_robot(make_core: Callable[..., SourceCore]) -> None:
    """Robots keep moving although ``transitions_allowed`` is 0. A restarted learner gets all Steps again."""
    core = make_core()
    core.step([THROTTLE], 1.0)
    for number in range(1, 20):
        inputs = [("learner", Welcome(1, "learner", 5))] if number == 10 else []
        outputs = core.step(inputs, 1.0 + number * PERIOD)
        sent = [message.sequence for to, message in outputs if to == "learner" and isinstance(message, Step)]
        assert sent == (list(range(11)) if number == 10 else [number])
    assert core.transitions == 19


def test_steps_for_an_absent_learner_are_kept_up_to_a_limit(make_core: Callable[..., SourceCore]) -> None:
    """The core makes QUEUE_LENGTH + 10 Steps, keeps the newest QUEUE_LENGTH + 1, and counts the nine dropped Steps."""
    core = make_core(length=10**6)
    core.step([THROTTLE], 1.0)
    for number in range(1, QUEUE_LENGTH + 10):
        core.step([], 1.0 + (number + 0.01) * PERIOD)
    outputs = core.step([("learner", Welcome(1, "learner", 5))], 1.0)
    again = [message.sequence for _, message in outputs if isinstance(message, Step)]
    assert again == list(range(9, QUEUE_LENGTH + 10))
    assert core.counters["forgotten"] == 9


def test_missed_deadlines_are_counted(make_core: Callable[..., SourceCore]) -> None:
    core = make_core()
    core.step([THROTTLE], 1.0)
    one(core.step([], 1.11))  # due at 1.02 s, so the deadlines 1.04, 1.06, 1.08, 1.10 pass without a step
    assert core.counters["overruns"] == 4
    assert core.step([], 1.1199) == []
    one(core.step([], 1.1201))


def test_a_simulated_robot_has_a_watchdog_too(scripted: Callable[..., Any], spec: RobotSpec) -> None:
    """``action_deadline_ms`` is 50. After the Action at 1.01 s, the next Action comes at 1.09 s, which is too late."""
    envs = VectorEnvironment(lambda _: scripted([(100, True, False)]), 1, 0, "sim-0", 2)
    guard = Guard(spec, "sim-0", SafetyConfig(action_deadline_ms=50, safe_action={"left": 2.0}))
    core = SourceCore(envs, "sim-0", 2, lockstep=False, pacing=RealTime(spec, "hold"), guard=guard)
    core.step([THROTTLE], 1.0)
    core.step([action(0, 1.5, 0)], 1.01)
    steps = [one(core.step([], 1.0 + number * PERIOD)) for number in range(1, 5)]
    assert [(step.origin, step.action[0, 0]) for step in steps] == [(1, 1.5), (2, 1.5), (2, 1.5), (4, 2.0)]
    core.step([action(4, 1.5, 0)], 1.09)
    assert one(core.step([], 1.10)).origin == ActionOrigin.SAFE


def test_at_full_speed_an_emergency_stop_prevents_steps_until_reset_and_activate(scripted: Callable[..., Any]) -> None:
    envs = VectorEnvironment(lambda _: scripted([(100, True, False)]), 1, 0, "sim-0", 2)
    core = SourceCore(envs, "sim-0", 2, lockstep=False)
    core.step([("learner", Throttle("sim-0", 2, 0, 100, 0, 0))], 1.0)
    one(core.step([action(0, 1.5, 0)], 1.1))
    core.step([("policy", Command(1, "", "estop", "", 0, "", b""))], 1.2)
    assert core.step([action(1, 1.5, 0)], 1.3) == []
    for verb in ("reset", "activate"):
        core.step([("policy", Command(1, "", verb, "", 0, "", b""))], 1.4)
    one(core.step([action(1, 1.5, 0)], 1.5))


@pytest.mark.parametrize(("mode", "kind"), [("fast", type(None)), ("realtime", RealTime)])
def test_configuration_selects_the_pacing(mode: Literal["fast", "realtime"], kind: type) -> None:
    core = simulator.make(Config(task="Hopper", pacing=PacingConfig(mode=mode)), "sim-0", 1)
    core.envs.close()
    assert type(core.pacing) is kind
