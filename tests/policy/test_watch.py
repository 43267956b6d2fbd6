"""How the policy server watches its sources, changes its states, and executes operators' commands."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, sha256
from td3_robot.core_types import Farewell, Input, Output, Peer
from td3_robot.errors import BundleError
from td3_robot.messages import Action, Bye, Command, Latches, LifecycleChange, Phase, Reply, Step, Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.safety.lifecycle import Cause, Held
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.specs import RobotSpec
from td3_robot.transport import codec
from td3_robot.transport.link import hello

STOP = Held(Cause.STOP, "smoke")
SAFE = SafetyConfig(safe_action={"left": 0.25}, observation_deadline_ms=100)
Cores = Callable[..., PolicyCore]


@pytest.fixture
def peer(spec: RobotSpec) -> Peer:
    return Peer("policy", b"1", hello("driver", "leg", client=1, robots=1, spec=spec), {})


@pytest.fixture
def make_core(peer: Peer, operator: Peer, make_bundle: Callable[..., Bundle]) -> Cores:
    """Makes the core of a server with a policy, a connected robot and a connected operator."""

    def make(safety: SafetyConfig = SAFE, **options: Any) -> PolicyCore:
        core = PolicyCore(9, safety=safety, **options)
        core.load(1, make_bundle(1))
        core.step([(peer, peer.hello), (operator, operator.hello)], 0.0)
        return core

    return make


def command(verb: str, target: str = "", payload: bytes = b"", version: int = 0) -> Command:
    return Command(77, target, verb, "because", version, sha256(payload) if payload else "", payload)


def actions(outputs: list[Output]) -> list[Action]:
    return [message for _, message in outputs if isinstance(message, Action)]


def changes(outputs: list[Output]) -> list[tuple[str, str]]:
    return [(message.node, message.state) for _, message in outputs if isinstance(message, LifecycleChange)]


def reply(core: PolicyCore, operator: Peer, asked: Command, now: float = 0.0) -> Reply:
    [answer] = [m for to, m in core.step([(operator, asked)], now) if isinstance(m, Reply) and to is operator]
    assert answer.id == 77
    return answer


def is_safe(action: Action) -> bool:
    safe = action.weights_version == 0
    assert not safe or action.action.tolist() == [[0.25, 0]]
    return safe


def only_safe(outputs: list[Output]) -> bool:
    """Whether there is an Action, and all Actions are the safe action."""
    found = [is_safe(action) for action in actions(outputs)]
    return bool(found) and all(found)


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
    for number in range(6, 20):  # observations return, but only activate ends the fault
        assert only_safe(core.step([(peer, make_step(number))], 1.2 + number * 0.02))


@pytest.mark.parametrize("target", ["", "leg"])
def test_activate_leaves_fault(
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


def test_automatic_recovery_after_the_recovery_time(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(SafetyConfig(observation_deadline_ms=100, recovery="automatic", recovery_ms=50))
    core.step([(peer, make_step(5))], 1.0)
    core.step([], 2.0)
    versions = [
        actions(core.step([(peer, make_step(6 + number))], 3.0 + number * 0.02))[0].weights_version
        for number in range(5)
    ]
    assert versions == [0, 0, 0, 1, 1]  # 3.06 is the first Step at least 50 ms after 3.00


def test_a_bad_observation_restarts_the_recovery_time(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    """Steps are 20 ms apart. The observation at 3.04 s is bad. 3.12 s is the first at least 50 ms after 3.06 s."""
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


def test_steps_that_queued_during_a_pause_are_answered_by_the_safe_action(
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
    """Steps are 20 ms apart. At 1.04 s, the constant value is 40 ms old. Only valid observations feed the watchdog."""
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


def joined(core: PolicyCore, peer: Peer, number: int, name: str, step: Step, now: float) -> Peer:
    """Connect another robot with the same specification, and send its Step."""
    robot = replace(peer, key=b"%d" % (10 + number), hello=changed(peer.hello, name=name))
    core.step([(robot, robot.hello), (robot, step)], now)
    return robot


def test_absent_robots_are_forgotten_after_1024_unless_stopped(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """The server remembers 1024 absent robots in FAULT.

    At the last removal of old robots, robot 1029 is still connected. So the absent robots 5 to 1028 remain. Robot 1029
    and the stopped robot 0 remain too.
    """
    core = make_core()
    for number in range(1030):
        robot = joined(core, peer, number, f"r{number}", make_step(0), float(number))
        # The 100 ms deadline passes.
        core.step([(operator, command("estop", "r0"))] if number == 0 else [], number + 0.5)
        core.step([(robot, Bye("sold"))], number + 0.6)
    held = core.safety_state.sources
    assert list(held) == ["r0", *(f"r{number}" for number in range(5, 1030))]
    detail = core.detail()
    assert detail["sources_in_all"] == len(held) == 1 + 1025
    assert {each["watch"] for each in detail["sources"].values()} == {"fault"}


def test_the_state_of_many_robots_fits_into_a_message(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """999 of 1000 robots are stopped. Each reason has the maximum length, and its characters have four bytes."""
    core = make_core()
    for number in range(1000):
        robot = joined(core, peer, number, f"{number:🦿>64}", make_step(0), 0.0)
        if number:
            stop = changed(command("estop", robot.name), reason="🦾" * 2048)
            core.step([(operator, stop)], 0.0)
    answer = reply(core, operator, command("state"))
    assert len(codec.encode(answer)) < Reply.MAX_BYTES
    detail = answer.detail
    assert (detail["sources_in_all"], detail["connected_in_all"]) == (1000, 1001)
    assert (len(detail["sources"]), len(detail["connected"])) == (256, 512)
    assert {each["watch"] for each in detail["sources"].values()} == {"fault"}
    assert len(detail["stopped"]) == 999
    assert len(codec.encode(Latches(core.safety_state.plain()))) < Latches.MAX_BYTES


def test_an_emergency_stop_overrides_actions_until_reset_and_activate(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core()
    core.step([(peer, make_step(1))], 1.0)
    inputs: list[Input] = [(peer, make_step(2)), (operator, command("estop"))]
    outputs = core.step(inputs, 1.01)
    assert only_safe(outputs)  # also for the Step that came before the command in the same turn
    assert ("policy", "fault") in changes(outputs)
    assert [(to, m.verb) for to, m in outputs if isinstance(m, Command)] == [(peer, "estop")]
    assert "emergency stop is in force" in reply(core, operator, command("activate"), 1.02).error
    newcomer = replace(peer, key=b"3", hello=changed(peer.hello, name="arm"))
    assert [m.verb for _, m in core.step([(newcomer, newcomer.hello)], 1.03) if isinstance(m, Command)] == ["estop"]
    assert reply(core, operator, command("reset"), 1.04).state == "inactive"
    assert only_safe(core.step([(peer, make_step(3))], 1.05))
    assert reply(core, operator, command("activate"), 1.06).state == "active"
    assert not is_safe(actions(core.step([(peer, make_step(4))], 1.07))[0])


def test_one_robot_can_be_stopped_alone(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core()
    other = replace(peer, key=b"3", hello=changed(peer.hello, name="arm"))
    steps: list[Input] = [(peer, make_step(1)), (other, make_step(1, source="arm"))]
    core.step([(other, other.hello), *steps], 0.0)
    outputs = core.step([(operator, command("estop", "leg")), *steps], 0.01)
    assert [is_safe(action) for action in actions(outputs)] == [True, False]
    for target in ("", "leg"):
        outputs = core.step([(operator, command("activate", target))], 0.02)
        [answer] = [message for _, message in outputs if isinstance(message, Reply)]
        assert "policy/leg: an emergency stop is in force" in answer.error
        assert peer not in [to for to, _ in outputs]
    core.step([(operator, command("reset", "leg")), (operator, command("activate", "leg"))], 0.03)
    assert [is_safe(action) for action in actions(core.step(steps, 0.04))] == [False, False]


def test_a_robot_can_send_no_command_except_estop_for_all_robots(
    make_core: Cores, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core()
    for forbidden in (command("shutdown"), command("estop", "leg")):
        assert core.step([(peer, peer.hello), (peer, forbidden)], 0.0) == []
    assert (
        "'shutdown' from leg is not carried out: a robot can send no command except estop for all robots" in caplog.text
    )
    assert core.lifecycle.active
    assert not core.safety.stopped
    outputs = core.step([(peer, command("estop"))], 0.0)
    assert core.lifecycle.stopped
    [relayed] = [message for to, message in outputs if to is peer]  # no Reply: a driver does not use one
    assert isinstance(relayed, Command)
    assert relayed.verb == "estop"


def test_without_autostart_robots_move_only_after_activate(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(autostart=False)
    assert actions(core.step([(peer, make_step(0))], 0.0)) == []
    assert (
        "cannot activate, its state is unconfigured; allowed: configure"
        in reply(core, operator, command("activate")).error
    )
    outputs = core.step([(operator, command("configure"))], 0.01)
    assert only_safe(outputs)  # the waiting Step
    core.step([(operator, command("activate"))], 0.02)
    assert not is_safe(actions(core.step([(peer, make_step(1))], 0.03))[0])
    core.step([(operator, command("deactivate"))], 0.04)
    assert is_safe(actions(core.step([(peer, make_step(2))], 0.05))[0])


def test_configure_activate_and_deactivate_without_a_target_apply_to_all_robots(
    make_core: Cores, peer: Peer, operator: Peer
) -> None:
    core = make_core(autostart=False)
    for verb in ("configure", "activate", "deactivate"):
        outputs = core.step([(operator, command(verb))], 0.0)
        assert [(to, m.verb, m.id) for to, m in outputs if isinstance(m, Command)] == [(peer, verb, 0)]
        [answer] = [m for _, m in outputs if isinstance(m, Reply)]
        assert not answer.error
    for verb in ("state", "freeze", "rollback", "shutdown"):
        assert not [m for _, m in core.step([(operator, command(verb))], 0.0) if isinstance(m, Command)]


def test_load_and_rollback(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = make_core()
    good = make_bundle(2)
    nan = {**good.tensors, "actor.0.bias": np.full(8, np.nan, np.float32)}
    outside = replace(good, safety=SafetyConfig(limits={"left": (2.0, 3.0)}))
    bad = [
        (command("load", payload=b"garbage"), "not a safetensors file"),
        (changed(command("load", payload=good.encode()), sha256="0" * 64), "hash"),
        (command("load", payload=replace(good, tensors=nan).encode()), "not finite"),
        (command("load", payload=replace(good, spec=replace(good.spec, name="Other")).encode()), "another robot"),
        (command("load", payload=good.encode(), version=1), "not newer than version 1"),
        (command("load", payload=outside.encode()), "safe_action of 'left' is 0.25 N; allowed: 2.0 to 3.0"),
        (command("rollback"), "no policy before version 1"),
        (command("rollback", version=7), "version 7 is not held: 1 are"),
        (command("dance"), "no verb 'dance'; allowed: state, configure"),
        (command("state", "arm"), "no robot 'arm' is connected; connected: leg"),
    ]
    for number, (asked, words) in enumerate(bad):
        assert words in reply(core, operator, asked).error
        [action] = actions(core.step([(peer, make_step(number))], 0.01 * number))
        assert action.weights_version == 1  # the old policy stays
    assert reply(core, operator, command("load", payload=good.encode()), 0.1).detail["version"] == 2
    payload = make_bundle(3).encode()
    core.step([("learner", Weights(3, 0, 0, sha256(payload), payload))], 0.1)
    assert core.store.serving is not None
    assert core.store.serving.version == 3
    answer = reply(core, operator, command("rollback"), 0.1)
    assert (answer.detail["version"], answer.detail["newest"], answer.detail["frozen"]) == (2, 3, True)
    core.step([("learner", Weights(4, 0, 0, sha256(payload), payload))], 0.1)
    assert core.counters["weights_frozen"] == 1
    assert reply(core, operator, command("rollback", version=1), 0.1).detail["version"] == 1
    reply(core, operator, command("unfreeze"), 0.1)
    core.step([("learner", Weights(5, 0, 0, sha256(payload), payload))], 0.1)
    assert actions(core.step([(peer, make_step(99))], 0.11))[0].weights_version == 5


def test_a_loaded_policy_is_kept_while_learner_versions_are_dropped(
    make_core: Cores, make_bundle: Callable[..., Bundle]
) -> None:
    core = make_core()
    payload = make_bundle(3).encode()
    for version in range(2, 100):
        core.step([("learner", Weights(version, 0, 0, sha256(payload), payload))], 0.0)
    assert sorted(core.store.held) == [1, 96, 97, 98, 99]
    assert core.store.roll_back().version == 1


def test_commands_for_one_robot_and_their_replies_are_relayed(make_core: Cores, peer: Peer, operator: Peer) -> None:
    core = make_core()
    outputs = core.step([(operator, command("state", "leg"))], 0.0)
    [(to, relayed)] = outputs
    assert to is peer
    assert isinstance(relayed, Command)
    assert (relayed.verb, relayed.target) == ("state", "")
    stranger = replace(peer, key=b"other", hello=changed(peer.hello, name="arm"))  # the Command is not for this robot
    core.step([(stranger, stranger.hello)], 0.0)
    assert core.step([(stranger, Reply(relayed.id, "x", "", "active", {}))], 0.0) == []
    [(to, answer)] = core.step([(peer, Reply(relayed.id, "x", "", "fault", {"a": 1}))], 0.0)
    assert to is operator
    assert isinstance(answer, Reply)
    assert (answer.id, answer.node, answer.state) == (77, "leg", "fault")
    assert core.step([(peer, Reply(relayed.id, "x", "", "fault", {}))], 0.0) == []  # a second reply is ignored
    for _ in range(3000):  # the memory for Commands to a robot that never replies is limited
        core.step([(operator, command("state", "leg"))], 0.0)
    assert len(core.desk._relayed) == 1024


@pytest.mark.parametrize("verb", ["activate", "deactivate", "reset", "estop"])
def test_commands_for_all_robots_have_id_0_and_need_no_reply(
    verb: str, make_core: Cores, peer: Peer, operator: Peer
) -> None:
    """Section 8 of the protocol: the robots get ``id`` 0, and only the server replies to the operator."""
    core = make_core()
    if verb == "reset":
        core.step([(operator, command("estop"))], 0.0)
    outputs = core.step([(operator, command(verb))], 0.0)
    [relayed] = [message for to, message in outputs if to is peer and isinstance(message, Command)]
    assert (relayed.id, relayed.verb, relayed.target) == (0, verb, "")
    [reply] = [message for to, message in outputs if to is operator and isinstance(message, Reply)]
    assert (reply.id, reply.error) == (77, "")
    answers = core.step([(peer, Reply(0, "leg", "", "active", {}))], 0.1)
    assert not [message for _, message in answers if isinstance(message, Reply)]


def test_state_changes_of_robots_are_relayed_to_operators(make_core: Cores, peer: Peer, operator: Peer) -> None:
    change = LifecycleChange("leg", "active", "fault", "no action for 100 ms", 5)
    assert make_core().step([(peer, change)], 0.0) == [(operator, change)]


def test_a_non_finite_action_is_replaced_by_the_safe_action(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = make_core()
    huge = {name: np.full_like(tensor, 3e38) for name, tensor in make_bundle().tensors.items()}
    huge["actor.1.weight"][:, ::2] *= -1  # infinity minus infinity
    core.load(2, replace(make_bundle(), tensors=huge))
    step = make_step(1, observation=np.ones((1, 3), np.float32))
    with np.errstate(all="ignore"):
        [action] = actions(core.step([(peer, step)], 0.0))
    assert core.counters["not_finite"] == 1
    assert is_safe(action)


def test_memory_does_not_grow(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step], rng: np.random.Generator
) -> None:
    """With limits, filters and watchdogs, memory grows by less than 2,000 bytes in 2,000 Steps, after 1,000 Steps.

    One of four measurements must pass, because a leak appears in all of them and other allocations do not.
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
    steps = [make_step(number, observation=rng.normal(size=(1, 3)).astype("f4")) for number in range(100)]
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


@pytest.mark.parametrize("how", ["fault", "stop"])
def test_a_learners_weights_neither_end_a_fault_nor_remove_the_limits(
    how: str,
    peer: Peer,
    operator: Peer,
    make_step: Callable[..., Step],
    make_bundle: Callable[..., Bundle],
) -> None:
    """The server has no safety settings. The deployed policy contains the settings."""
    core = PolicyCore(9)
    deployed = SafetyConfig(limits={"left": (-0.5, 0.5)}, safe_action={"left": 0.25}, observation_deadline_ms=100)
    core.load(1, replace(make_bundle(1), safety=deployed))
    core.step([(peer, peer.hello), (operator, operator.hello), (peer, make_step(1))], 0.0)
    core.step([(operator, command("estop", "leg"))] if how == "stop" else [], 1.0)
    for version, now in ((2, 1.1), (3, 1.12)):
        payload = learned(make_bundle(version)).encode()
        weights: Input = ("learner", Weights(version, 0, 0, sha256(payload), payload))
        assert only_safe(core.step([weights, (peer, make_step(version))], now))
        assert core.detail()["sources"]["leg"]["watch"] == "fault"
    core.step([(operator, command("reset", "leg")), (operator, command("activate", "leg"))], 1.13)
    [action] = actions(core.step([(peer, make_step(4))], 1.14))
    assert (action.weights_version, action.action[0, 0]) == (3, 0.5)
    core.step([], 1.2401)  # the deployed policy's deadline
    assert core.detail()["sources"]["leg"]["watch"] == "fault"


def learned(bundle: Bundle) -> Bundle:
    """Return a policy without safety settings. Its action is the maximum in the first channel."""
    tensors = {name: np.zeros_like(tensor) for name, tensor in bundle.tensors.items()}
    last = max(name for name in tensors if name.endswith("bias"))
    tensors[last][0] = 100
    return replace(bundle, tensors=tensors)


def test_a_fault_stays_when_the_safety_settings_are_removed(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    """Only ``activate`` ends the fault. Loading a policy without settings does not end it."""
    core = make_core(SafetyConfig())
    core.load(2, replace(make_bundle(2), safety=SAFE))
    core.step([(peer, make_step(1))], 0.0)
    core.step([], 1.0)
    core.load(3, make_bundle(3))
    assert [action.weights_version for action in actions(core.step([(peer, make_step(2))], 1.1))] == [0]
    core.step([(operator, command("activate"))], 1.2)
    assert [action.weights_version for action in actions(core.step([(peer, make_step(3))], 1.3))] == [3]


def test_a_rollback_restores_the_safety_settings_of_the_old_policy(make_bundle: Callable[..., Bundle]) -> None:
    core = PolicyCore(9)
    core.load(1, replace(make_bundle(1), safety=SafetyConfig(limits={"left": (-0.5, 0.5)})))
    core.load(2, make_bundle(2))
    core.store.add(3, Actor(make_bundle(3)))
    assert core.store.serving is not None
    assert core.store.serving.safety.envelope.high[0] > 0.5
    core.store.roll_back(1)
    core.store.add(4, Actor(make_bundle(4)))
    assert core.store.serving.safety.envelope.high[0] == 0.5


def test_resetting_an_active_watch_keeps_its_deadline(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core()
    core.step([(peer, make_step(5))], 1.0)
    core.step([(operator, command("reset", "leg"))], 1.01)
    assert core.due == pytest.approx(1.1)


def sent_to(outputs: list[Output], robot: Peer) -> list[str]:
    return [message.verb for to, message in outputs if to is robot and isinstance(message, Command)]


@pytest.mark.parametrize("safety", [SAFE, SafetyConfig()], ids=["watched", "not watched"])
def test_a_stop_of_one_robot_survives_a_restart_of_its_driver(
    make_core: Cores, peer: Peer, operator: Peer, safety: SafetyConfig
) -> None:
    core = make_core(safety)
    assert sent_to(core.step([(operator, command("estop", "leg"))], 0.0), peer) == ["estop"]
    restarted = replace(peer, key=b"3", hello=changed(peer.hello, client=8, incarnation=1))
    assert sent_to(core.step([(peer, Bye("killed")), (restarted, restarted.hello)], 1.0), restarted) == ["estop"]
    for target in ("leg", ""):
        answer = reply(core, operator, command("activate", target), 2.0)
        assert "policy/leg: an emergency stop is in force; reset it first" in answer.error
    assert reply(core, operator, command("state"), 2.0).detail["stopped"] == ["leg"]
    assert sent_to(core.step([(operator, command("reset", "leg"))], 3.0), restarted) == ["reset"]
    assert sent_to(core.step([(operator, command("activate", "leg"))], 4.0), restarted) == ["activate"]
    again = replace(peer, key=b"4")
    assert sent_to(core.step([(restarted, Bye("")), (again, again.hello)], 5.0), again) == []


@pytest.mark.parametrize("target", ["", "leg"])
def test_a_stop_of_an_absent_robot_is_sent_when_it_connects(
    make_core: Cores, peer: Peer, operator: Peer, target: str
) -> None:
    """The Reply is still an error, because no robot stopped and the name may be wrong."""
    core = make_core(SafetyConfig())
    core.step([(peer, Bye(""))], 0.0)
    answer = reply(core, operator, command("estop", "leg"), 1.0)
    assert "no robot 'leg' is connected; connected: none; the stop is latched" in answer.error
    assert sent_to(core.step([(peer, peer.hello)], 2.0), peer) == ["estop"]
    assert sent_to(core.step([(operator, command("reset", target))], 3.0), peer) == ["reset"]
    core.step([(peer, Bye(""))], 4.0)
    assert sent_to(core.step([(peer, peer.hello)], 5.0), peer) == []


def test_a_stop_of_an_absent_robot_can_be_reset(make_core: Cores, peer: Peer, operator: Peer) -> None:
    core = make_core(SafetyConfig())
    core.step([(peer, Bye(""))], 0.0)
    assert "no robot 'leg' is connected" in reply(core, operator, command("reset", "leg")).error
    reply(core, operator, command("estop", "leg"))
    answer = reply(core, operator, command("reset", "leg"))
    assert (answer.error, answer.detail["stopped"]) == ("", [])
    assert sent_to(core.step([(peer, peer.hello)], 1.0), peer) == []


def test_a_stopped_robot_without_settings_gets_the_safe_action(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(SafetyConfig())
    [action] = actions(core.step([(peer, make_step(1))], 0.1))
    assert action.weights_version > 0
    applied = np.array([[0.5, -0.25]], np.float32)
    outputs = core.step([(operator, command("estop", "leg")), (peer, make_step(2, action=applied))], 0.2)
    [action] = actions(outputs)
    # No settings: the safe action repeats the applied one. Version 0 means that no policy computed it.
    assert (action.weights_version, action.action.tolist()) == (0, applied.tolist())
    assert core.counters["safe_actions"] == 1
    [action] = actions(core.step([(operator, command("activate", "leg")), (peer, make_step(3))], 0.3))
    assert action.weights_version == 0
    [action] = actions(core.step([(operator, command("reset", "leg")), (peer, make_step(4))], 0.4))
    assert action.weights_version > 0


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


def test_an_unconfigured_server_reports_no_missing_observations(
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


@pytest.mark.parametrize("state", ["active", "fault"])
@pytest.mark.parametrize("recovery", ["manual", "automatic"])
def test_a_robot_deactivated_by_name_stays_inactive(
    recovery: Any, state: str, make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """The robot stays inactive when its driver restarts, and when the server restarts from the state file."""
    safety = SafetyConfig(safe_action={"left": 0.25}, observation_deadline_ms=100, recovery=recovery, recovery_ms=1)
    core = make_core(safety)
    core.step([(peer, make_step(1))], 1.0)
    if state == "fault":
        core.step([], 2.0)
    outputs = core.step([(operator, command("deactivate", "leg"))], 1.05 if state == "active" else 3.0)
    assert [to for to, message in outputs if isinstance(message, Command)] == [peer]
    assert core.safety_state.sources == {"leg": Held(Cause.INACTIVE)}
    for number in range(2, 20):
        assert only_safe(core.step([(peer, make_step(number))], 3.0 + number * 0.02))
    core.step([(peer, Bye("restarted"))], 4.0)
    restarted = make_core(safety)
    restarted.resume(core.safety_state, 0.0)
    for server in (core, restarted):
        again = replace(peer, key=b"9")
        outputs = server.step([(again, again.hello), (again, make_step(0, incarnation=1))], 5.0)
        assert only_safe(outputs)
        server.step([(operator, command("activate", "leg"))], 6.0)
        [action] = actions(server.step([(again, make_step(1, incarnation=1))], 6.1))
        assert not is_safe(action)


def test_activating_the_server_also_activates_a_robot_that_was_away(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """The robot disconnects before the ``activate``, and is active when it connects again."""
    core = make_core()
    core.step([(peer, make_step(1))], 1.0)
    core.step([(operator, command("deactivate"))], 1.01)
    core.step([(peer, Bye("restarted"))], 1.02)
    core.step([(operator, command("activate"))], 2.0)
    again = replace(peer, key=b"9")
    [action] = actions(core.step([(again, again.hello), (again, make_step(0, incarnation=1))], 3.0))
    assert not is_safe(action)


def test_at_the_start_of_an_episode_rate_limit_and_safe_action_use_the_held_action(
    make_core: Cores, peer: Peer, make_step: Callable[..., Step]
) -> None:
    """The held action is 1.5. The rate allows a change of 0.1 in a period. In FAULT the safe action is 1.5."""
    core = make_core(SafetyConfig(rate=5.0, observation_deadline_ms=100))  # the toy robot's period is 0.02 s
    held = np.array([[1.5, 0.25]], np.float32)
    step = make_step(3, phase=np.zeros(1, np.uint8), action=held)
    [action] = actions(core.step([(peer, step)], 1.0))
    assert (np.abs(action.action - held) <= 0.1 + 1e-6).all()
    core.step([], 2.0)
    [action] = actions(core.step([(peer, make_step(4, phase=np.zeros(1, np.uint8), action=held))], 3.0))
    assert (action.weights_version, action.action.tolist()) == (0, held.tolist())


def test_far_too_large_weights_of_a_learner_are_refused_before_hashing(make_core: Cores) -> None:
    """Hashing the largest Weights, 67 MB, would delay every robot. A policy that a person loads has no such limit."""
    core = make_core()
    junk = bytes(3_000_000)
    core.step([("learner", Weights(2, 0, 0, "0" * 64, junk))], 1.0)
    assert core.counters["weights_refused"] == 1
    with pytest.raises(BundleError, match=r"version 2 have 3,000,000 bytes; allowed: at most 1,04[0-9],[0-9]{3}"):
        core.store.receive(2, "0" * 64, junk)
    with pytest.raises(BundleError, match="hash"):
        core.store.receive(2, "0" * 64, junk, loaded=True)


RESETS = SafetyConfig(safe_action={"left": 0.25}, observation_deadline_ms=200, reset_timeout_ms=3000)


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
    """The reset lasts 2 s, and the deadline is 200 ms. After the reset, the deadline holds again."""
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
    """A blocked driver sends no Heartbeats, so the server forgets the client before the reset times out."""
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
    """A failed sensor ends the episode. The driver reports its fault after the last Step, in the same turn."""
    core = make_core(RESETS)
    failed = LifecycleChange("leg", "active", "fault", "observe: no sensor", 0)
    core.step([(peer, make_phase(4, Phase.TRUNCATED, 4)), (peer, failed)], 1.0)
    assert core.due == pytest.approx(1.2)
    assert changes(core.step([], 1.3)) == [("policy/leg", "fault")]


@pytest.mark.parametrize(("queued", "faults"), [(10, []), (11, [("policy/leg", "fault")])])
def test_too_many_queued_steps_after_a_reset_cause_a_fault(
    make_core: Cores, peer: Peer, make_phase: Callable[..., Step], queued: int, faults: list[tuple[str, str]]
) -> None:
    """The server is suspended during the reset. A period is 20 ms, so 10 queued periods are within the deadline."""
    core = make_core(RESETS)
    core.step([(peer, make_phase(4, Phase.TERMINATED, 4))], 1.0)
    steps = [(peer, make_phase(5 + k, Phase.MID if k else Phase.FIRST, k)) for k in range(queued + 1)]
    outputs = core.step(steps, 2.5)
    assert changes(outputs) == faults
    assert [is_safe(action) for action in actions(outputs)] == [bool(faults)]


def test_a_reset_is_not_a_frozen_observation(make_core: Cores, peer: Peer, make_phase: Callable[..., Step]) -> None:
    """The robot is at the same place before and after the reset. Within an episode, it may rest for 30 ms at most."""
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
