"""How the policy server watches its sources."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, sha256
from td3_robot.core_types import Farewell, Peer
from td3_robot.messages import Bye, Command, LifecycleChange, Phase, Step, Weights
from td3_robot.policy.core import PolicyCore
from td3_robot.safety.lifecycle import Cause, Held
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.specs import RobotSpec
from tests.policy.served_robot import SAFE, Cores, actions, changes, command, is_safe, joined, leg, only_safe

STOP = Held(Cause.STOP, "smoke")


RESETS = SafetyConfig(safe_action={"left": 0.25}, observation_deadline_ms=200, reset_timeout_ms=3000)


@pytest.fixture
def peer(spec: RobotSpec) -> Peer:
    return leg(spec)


def test_a_missing_observation_causes_the_safe_action_and_a_fault(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core()
    [action] = actions(core.step([(peer, make_step(5))], 1.0))
    assert not is_safe(action)
    assert core.due == pytest.approx(1.1)
    assert core.step([], 1.0999) == []
    outputs = core.step([], 1.1001)
    [action] = actions(outputs)
    assert is_safe(action)
    assert action.answers == 5
    assert changes(outputs) == [("policy/leg", "fault")]
    assert core.due is None
    for number in range(6, 20):  # observations return, but only a command ends the fault
        assert only_safe(core.step([(peer, make_step(number))], 1.2 + number * 0.02))


@pytest.mark.parametrize("target", ["", "leg"])
def test_activate_ends_a_fault(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step], target: str
) -> None:
    core = make_core()
    core.step([(peer, make_step(5))], 1.0)
    core.step([], 2.0)
    outputs = core.step([(operator, command("activate", target))], 3.0)
    assert changes(outputs) == [("policy/leg", "active")]
    # The robot receives the command too.
    assert [to for to, message in outputs if isinstance(message, Command)] == [peer]
    [action] = actions(core.step([(peer, make_step(6))], 4.0))
    assert not is_safe(action)


def test_automatic_recovery_ends_a_fault_after_the_recovery_time(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(SafetyConfig(observation_deadline_ms=100, recovery="automatic", recovery_ms=50))
    core.step([(peer, make_step(5))], 1.0)
    core.step([], 2.0)
    versions = [
        actions(core.step([(peer, make_step(6 + number))], 3.0 + number * 0.02))[0].weights_version
        for number in range(5)
    ]
    assert versions == [0, 0, 0, 1, 1]  # the 50 ms begin at 3.00 s and end before 3.06 s


def test_a_bad_observation_restarts_the_recovery_time(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    """Steps are 20 ms apart. The observation at 3.04 s is bad. The 50 ms begin at 3.06 s and end before 3.12 s."""
    core = make_core(
        SafetyConfig(observation_deadline_ms=100, recovery="automatic", recovery_ms=50, refuse_out_of_range=True)
    )
    core.step([(peer, make_step(5))], 1.0)
    core.step([], 2.0)
    versions = []
    for number in range(7):
        value = 6.0 if number == 2 else 4.0
        step = make_step(6 + number, observation=np.full((1, 3), value, np.float32))
        versions.append(actions(core.step([(peer, step)], 3.0 + number * 0.02))[0].weights_version)
    assert versions == [0, 0, 0, 0, 0, 0, 1]


def test_the_newest_queued_step_gets_the_safe_action_after_a_pause_of_the_server(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core()
    core.step([(peer, make_step(5))], 1.0)
    outputs = core.step([(peer, make_step(number)) for number in range(6, 100)], 3.0)
    assert changes(outputs) == [("policy/leg", "fault")]
    assert [(action.answers, is_safe(action)) for action in actions(outputs)] == [(5, True), (99, True)]
    assert core.counters["skipped"] == 93


def test_a_step_that_waited_too_long_for_weights_is_stale(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(9, safety=SAFE)
    core.step([(peer, make_step(5))], 1.0)
    payload = make_bundle(1).encode()
    assert core.step([("learner", Weights(1, 0, 0, sha256(payload), payload))], 1.2) == []
    core.step([], 1.25)
    assert core.counters["stale"] == 1
    assert actions(core.step([(peer, make_step(6))], 1.3))


@pytest.mark.parametrize(
    ("safety", "values", "words"),
    [
        (SafetyConfig(refuse_out_of_range=True), [4.0, 6.0, 6.0, 6.0], "'o0' of robot 0 is 6 m"),
        (SafetyConfig(frozen_ms=30), [4.0, 4.0, 4.0, 4.0], "the same for 30 ms"),
    ],
)
def test_invalid_observations_cause_the_safe_action_and_then_a_fault(
    safety: SafetyConfig, values: list[float], words: str, make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    """Steps are 20 ms apart. Only valid observations feed the watchdog.

    In the case with ``frozen_ms``, the value is always 4.0. At 1.04 s, the value has stayed the same for 40 ms.
    """
    core = make_core(changed(safety, observation_deadline_ms=100))
    versions = []
    for number, value in enumerate(values):
        step = make_step(number + 1, observation=np.full((1, 3), value, np.float32))
        [action] = actions(core.step([(peer, step)], 1.0 + number * 0.02))
        versions.append(action.weights_version)
    assert versions == ([1, 0, 0, 0] if safety.refuse_out_of_range else [1, 1, 0, 0])
    [change] = [message for _, message in core.step([], 1.2) if isinstance(message, LifecycleChange)]
    assert (change.node, change.state) == ("policy/leg", "fault")
    assert change.reason.startswith("no observation for 100 ms: ")
    assert words in change.reason


def test_a_repeated_step_does_not_feed_the_watchdog(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core()
    for now in (1.0, 1.06):
        core.step([(peer, make_step(5))], now)
    assert core.due == pytest.approx(1.1)


def test_a_repeated_step_is_not_a_frozen_observation(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(SafetyConfig(frozen_ms=30))
    for now in (1.0, 9.0):
        [action] = actions(core.step([(peer, make_step(5))], now))
        assert action.weights_version == 1


def test_a_reconnect_does_not_end_a_fault(make_core: Cores, peer: Peer, make_step: Callable[..., Step]) -> None:
    core = make_core()
    core.step([(peer, make_step(5))], 1.0)
    core.step([], 2.0)
    core.step([(peer, Bye("gone"))], 3.0)
    again = replace(peer, key=b"9")
    outputs = core.step([(again, again.hello), (again, make_step(0, incarnation=1))], 4.0)
    assert only_safe(outputs)


def test_the_server_remembers_the_last_1024_absent_robots_and_all_stopped_robots(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """The server remembers 1024 absent robots in FAULT.

    The server forgets robots only when the state of a watch changes. The last change is the fault of robot 1029. At
    this time, robot 1029 is still connected. So the absent robots 5 to 1028 remain. Robot 1029 and the stopped robot 0
    remain too.
    """
    core = make_core()
    for number in range(1030):
        robot = joined(core, peer, number, f"r{number}", make_step(0), float(number))
        # Half a second after its Step, the robot has missed the deadline of 100 ms.
        core.step([(operator, command("estop", "r0"))] if number == 0 else [], number + 0.5)
        core.step([(robot, Bye("sold"))], number + 0.6)
    held = core.safety_state.sources
    assert list(held) == ["r0", *(f"r{number}" for number in range(5, 1030))]
    detail = core.detail()
    assert detail["sources_in_all"] == len(held) == 1 + 1025
    assert {each["watch"] for each in detail["sources"].values()} == {"fault"}


@pytest.mark.parametrize("guarded", [True, False])
def test_a_non_finite_action_is_replaced_by_the_safe_action(
    guarded: bool,
    peer: Peer,
    make_core: Cores,
    make_step: Callable[..., Step],
    make_bundle: Callable[..., Bundle],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without safety settings, the server does not answer. With or without settings, it counts the Step once."""
    core = make_core() if guarded else PolicyCore(0, exploring=False)
    if not guarded:
        core.step([(peer, peer.hello)], 0.0)
    huge = {name: np.full_like(tensor, 3e38) for name, tensor in make_bundle().tensors.items()}
    huge["actor.1.weight"][:, ::2] *= -1  # the sums contain infinity minus infinity, which is NaN
    core.load(2, replace(make_bundle(), tensors=huge))
    step = make_step(1, observation=np.ones((1, 3), np.float32))
    with np.errstate(all="ignore"):
        answers = [*actions(core.step([(peer, step)], 0.0)), *actions(core.step([], 0.01))]
    assert core.counters["not_finite"] == 1
    assert [is_safe(action) for action in answers] == [True] * guarded
    sent = "the safe action" if guarded else "no action"
    assert f"weights version 2 for sim-0 is not finite: the server sends {sent}" in caplog.text


def test_memory_does_not_grow(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step], rng: np.random.Generator
) -> None:
    """With limits, filters and watchdogs, 2,000 Steps add less than 2,000 bytes of memory.

    The first 1,000 Steps do not count. Then the test measures the growth four times. A leak increases all four values.
    Other allocations increase only some. So the test needs only one value below 2,000.
    """
    safety = SafetyConfig(
        limits=(-0.4, 0.4),
        rate=5.0,
        low_pass=10.0,
        refuse_out_of_range=True,
        frozen_ms=500,
        observation_deadline_ms=1e3,
    )
    core = make_core(safety)
    steps = [make_step(number, observation=rng.uniform(-1, 1, (1, 3)).astype("f4")) for number in range(100)]
    kept: list[int] = []
    tracemalloc.start()
    for number in range(9000):
        core.step([(peer, steps[number % 100])], number * 0.02)
        if number % 2000 == 999:
            kept.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert core.counters["safe_actions"] == 0
    assert len(kept) == 5
    assert min(np.diff(kept)) < 2000


def test_the_command_reset_does_not_change_the_deadline_of_an_active_watch(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core()
    core.step([(peer, make_step(5))], 1.0)
    core.step([(operator, command("reset", "leg"))], 1.01)
    assert core.due == pytest.approx(1.1)


@pytest.mark.parametrize("begins", [True, False], ids=["at the start", "after an activate"])
def test_invalid_observations_from_the_start_cause_a_fault(
    begins: bool, make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """All observations after the start or the ``activate`` are invalid. The watch is in FAULT after 100 ms."""
    core, now = make_core(SafetyConfig(refuse_out_of_range=True, observation_deadline_ms=100)), 1.0
    if not begins:
        core.step([(peer, make_step(1))], now)
        assert changes(core.step([], now + 0.2)) == [("policy/leg", "fault")]
        core.step([(operator, command("activate"))], now + 0.3)
        now += 0.4
    faults = []
    for number in range(2, 9):
        step = make_step(number, observation=np.full((1, 3), 6.0, np.float32))
        outputs = core.step([(peer, step)], now + (number - 2) * 0.02)
        assert {action.weights_version for action in actions(outputs)} == {0}
        faults += [change for change in changes(outputs) if change[1] == "fault"]
    assert faults == [("policy/leg", "fault")]


def test_an_unconfigured_server_does_not_report_missing_observations(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """The server restarts during a stop. A person resets the stop first, and configures the server later."""
    core = make_core(autostart=False)
    core.resume(SafetyState(server=STOP, sources={"leg": STOP}), 0.5)
    core.step([(peer, make_step(1))], 1.0)
    core.step([(operator, command("reset"))], 1.01)
    core.step([(operator, command("activate", "leg"))], 1.02)
    assert core.lifecycle.state == "unconfigured"
    for number in range(2, 30):
        assert changes(core.step([(peer, make_step(number))], 1.0 + number * 0.02)) == []
    core.step([(operator, command("configure"))], 2.0)
    core.step([(operator, command("activate"))], 2.0)
    core.step([(peer, make_step(31))], 2.01)
    assert changes(core.step([], 2.12)) == [("policy/leg", "fault")]


def test_rate_limit_and_safe_action_use_the_held_action_at_the_start_of_an_episode(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    """The robot holds the action ``held``. The rate allows a change of 0.1 in a period.

    In FAULT, ``held`` is the safe action.
    """
    core = make_core(SafetyConfig(rate=5.0, observation_deadline_ms=100))  # the toy robot's period is 0.02 s
    held = np.array([[1.5, 0.25]], np.float32)
    step = make_step(3, phase=np.zeros(1, np.uint8), action=held)
    [action] = actions(core.step([(peer, step)], 1.0))
    assert (np.abs(action.action - held) <= 0.1 + 1e-6).all()
    core.step([], 2.0)
    [action] = actions(core.step([(peer, make_step(4, phase=np.zeros(1, np.uint8), action=held))], 3.0))
    assert (action.weights_version, action.action.tolist()) == (0, held.tolist())


@pytest.fixture
def make_phase(make_step: Callable[..., Step]) -> Callable[..., Step]:
    """Makes a Step with the given phase. In most tests, an episode ends at Step 4 and the next begins at Step 5."""

    def make(sequence: int, phase: Phase, episode_step: int = 0, **fields: Any) -> Step:
        phases, steps = np.full(1, phase, np.uint8), np.full(1, episode_step, np.uint32)
        return make_step(sequence, phase=phases, episode_step=steps, **fields)

    return make


@pytest.mark.parametrize("end", [Phase.TERMINATED, Phase.TRUNCATED])
def test_the_watch_waits_while_a_robot_resets(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step], end: Phase
) -> None:
    """The reset lasts 2 s of the allowed 3 s. The deadline of 200 ms holds again after the reset."""
    core = make_core(RESETS)
    core.step([(peer, make_phase(4, end, 4))], 1.0)
    assert core.due == pytest.approx(4.0)
    assert core.step([], 2.9) == []
    [action] = actions(core.step([(peer, make_phase(5, Phase.FIRST))], 3.0))
    assert not is_safe(action)
    assert core.due == pytest.approx(3.2)
    assert changes(core.step([], 3.3)) == [("policy/leg", "fault")]


def test_a_robot_that_does_not_come_back_from_its_reset_is_in_fault(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step]
) -> None:
    core = make_core(RESETS)
    core.step([(peer, make_phase(4, Phase.TERMINATED, 4))], 1.0)
    [change] = [message for _, message in core.step([], 4.1) if isinstance(message, LifecycleChange)]
    assert (change.node, change.state) == ("policy/leg", "fault")
    assert change.reason == "no observation for 3000 ms: the robot did not come back from its reset"
    assert only_safe(core.step([(peer, make_phase(5, Phase.FIRST))], 5.0))


def test_the_watch_waits_30_seconds_for_a_reset_by_default(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step]
) -> None:
    core = make_core(SAFE)
    core.step([(peer, make_phase(4, Phase.TERMINATED, 4))], 1.0)
    assert core.due == pytest.approx(31.0)


@pytest.mark.parametrize("reason", ["silent for 5.0 s", Farewell.RECONNECTED.value])
def test_a_robot_that_is_lost_during_its_reset_is_in_fault_after_the_timeout(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step], reason: str
) -> None:
    """A blocked driver sends no Heartbeats. So the server regards it as disconnected before the reset times out."""
    core = make_core(RESETS)
    core.step([(peer, make_phase(4, Phase.TERMINATED, 4))], 1.0)
    core.step([(peer, Bye(reason))], 3.0)
    assert changes(core.step([], 4.1)) == [("policy/leg", "fault")]


def test_a_robot_that_leaves_during_its_reset_is_forgotten(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step]
) -> None:
    core = make_core(RESETS)
    core.step([(peer, make_phase(4, Phase.TERMINATED, 4))], 1.0)
    core.step([(peer, Bye(Farewell.STOPPED.value))], 3.0)
    assert core.due is None
    assert changes(core.step([], 4.1)) == []


def test_a_fault_of_the_robot_ends_the_wait_for_its_reset(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step]
) -> None:
    """A failed sensor ends the episode. In one turn, the server gets the last Step and then the driver's fault."""
    core = make_core(RESETS)
    failed = LifecycleChange("leg", "active", "fault", "observe: no sensor", 0)
    core.step([(peer, make_phase(4, Phase.TRUNCATED, 4)), (peer, failed)], 1.0)
    assert core.due == pytest.approx(1.2)
    assert changes(core.step([], 1.3)) == [("policy/leg", "fault")]


@pytest.mark.parametrize(("queued", "faults"), [(10, []), (11, [("policy/leg", "fault")])])
def test_too_many_queued_steps_after_a_reset_cause_a_fault(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step], queued: int, faults: list[tuple[str, str]]
) -> None:
    """The server is suspended during the reset. The deadline of 200 ms covers 10 periods of 20 ms, not 11."""
    core = make_core(RESETS)
    core.step([(peer, make_phase(4, Phase.TERMINATED, 4))], 1.0)
    steps = [(peer, make_phase(5 + k, Phase.MID if k else Phase.FIRST, k)) for k in range(queued + 1)]
    outputs = core.step(steps, 2.5)
    assert changes(outputs) == faults
    assert [is_safe(action) for action in actions(outputs)] == [bool(faults)]


def test_a_reset_is_not_a_frozen_observation(make_core: Cores, peer: Peer, make_phase: Callable[..., Step]) -> None:
    """The observation never changes. The 2 s of the reset do not count. After the reset, 40 ms exceed ``frozen_ms``."""
    core, seen = make_core(SafetyConfig(frozen_ms=30)), np.zeros((1, 3), np.float32)
    versions = [
        actions(core.step([(peer, make_phase(number, phase, number - 5, observation=seen))], now))[0].weights_version
        for number, phase, now in [
            (5, Phase.TERMINATED, 1.0),
            (6, Phase.FIRST, 3.0),
            (7, Phase.MID, 3.02),
            (8, Phase.MID, 3.04),
        ]
    ]
    assert versions == [1, 1, 1, 0]


def test_the_watch_does_not_wait_if_only_some_robots_are_in_reset(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(RESETS)
    core.step([(peer, make_step(4, robots=2, phase=np.array([Phase.TERMINATED, Phase.MID], np.uint8)))], 1.0)
    assert core.due == pytest.approx(1.2)
