"""How the policy server executes operators' commands.

Also tests which states of a robot survive new weights, a restart of the driver or server, and the robot's absence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, sha256
from td3_robot.core_types import Input, Output, Peer
from td3_robot.errors import BundleError
from td3_robot.messages import Bye, Command, Latches, LifecycleChange, Reply, Step, Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.safety.lifecycle import Cause, Held
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from td3_robot.transport import codec
from tests.policy.served_robot import SAFE, Cores, actions, changes, command, is_safe, joined, leg, only_safe, reply


@pytest.fixture
def peer(spec: RobotSpec) -> Peer:
    return leg(spec)


def test_the_state_of_many_robots_fits_into_a_message(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """999 of 1000 robots are stopped. Each reason has the maximum length, and each character has four bytes."""
    core = make_core()
    for number in range(1000):
        robot = joined(core, peer, number, f"{number:🦿>64}", make_step(0), 0.0)
        if number:
            stop = changed(command("estop", robot.name), reason="🦾" * 2048)
            core.step([(operator, stop)], 0.0)
    answer = reply(core, operator, command("state"))
    assert len(codec.encode(answer)) < Reply.MAX_BYTES
    detail = answer.detail
    # ``leg`` is connected, too, but the server watches over it only after its first Step.
    assert (detail["sources_in_all"], detail["connected_in_all"]) == (1000, 1001)
    assert (len(detail["sources"]), len(detail["connected"])) == (256, 512)  # the most that a Reply lists
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
    assert only_safe(outputs)  # also for the Step that came before the command in the same call
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
    [relayed] = [message for to, message in outputs if to is peer]  # no Reply: a driver does not need it
    assert isinstance(relayed, Command)
    assert relayed.verb == "estop"


def test_robots_move_only_after_activate_if_autostart_is_off(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(autostart=False)
    assert actions(core.step([(peer, make_step(0))], 0.0)) == []
    assert (
        "cannot activate, its state is unconfigured; allowed: configure"
        in reply(core, operator, command("activate")).error
    )
    outputs = core.step([(operator, command("configure"))], 0.01)
    assert only_safe(outputs)  # this Action answers the waiting Step
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


def test_load_serves_a_new_policy_and_rollback_serves_an_older_policy(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = make_core()
    good = make_bundle(2)
    nan = {**good.tensors, "actor.0.bias": np.full(8, np.nan, np.float32)}
    huge = {name: tensor * np.float32(1e30) for name, tensor in good.tensors.items()}
    outside = replace(good, safety=SafetyConfig(limits={"left": (2.0, 3.0)}))
    bad = [
        (command("load", payload=b"garbage"), "not a safetensors file"),
        (changed(command("load", payload=good.encode()), sha256="0" * 64), "hash"),
        (command("load", payload=replace(good, tensors=nan).encode()), "not finite"),
        (command("load", payload=replace(good, tensors=huge).encode()), "gives actions that are not finite"),
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
    for _ in range(3000):  # the robot never replies: the server remembers only the newest 1024 Commands
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


@pytest.mark.parametrize("how", ["fault", "stop"])
def test_weights_of_a_learner_neither_end_a_fault_nor_remove_the_limits(
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
    core.step([], 1.2401)  # more than 100 ms after the Step: the deadline of the deployed policy has passed
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
    """The fault stays until a person ends it, here with ``activate``. A policy without settings does not end it."""
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
def test_a_stop_of_an_absent_robot_is_sent_when_the_robot_connects(
    make_core: Cores, peer: Peer, operator: Peer, target: str
) -> None:
    """Although the server keeps the stop, the Reply is an error: no robot stopped, and the name may be wrong."""
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


def test_a_stopped_robot_without_safety_settings_gets_the_safe_action(
    make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    core = make_core(SafetyConfig())
    [action] = actions(core.step([(peer, make_step(1))], 0.1))
    assert action.weights_version > 0
    applied = np.array([[0.5, -0.25]], np.float32)
    outputs = core.step([(operator, command("estop", "leg")), (peer, make_step(2, action=applied))], 0.2)
    [action] = actions(outputs)
    # Without settings, the safe action repeats the applied action. Version 0 means: no policy computed it.
    assert (action.weights_version, action.action.tolist()) == (0, applied.tolist())
    assert core.counters["safe_actions"] == 1
    [action] = actions(core.step([(operator, command("activate", "leg")), (peer, make_step(3))], 0.3))
    assert action.weights_version == 0
    [action] = actions(core.step([(operator, command("reset", "leg")), (peer, make_step(4))], 0.4))
    assert action.weights_version > 0


@pytest.mark.parametrize("state", ["active", "fault"])
@pytest.mark.parametrize("recovery", ["manual", "automatic"])
def test_a_robot_deactivated_by_name_stays_inactive(
    recovery: Any, state: str, make_core: Cores, peer: Peer, operator: Peer, make_step: Callable[..., Step]
) -> None:
    """The robot stays inactive when its driver restarts, and when a new server resumes the safety state."""
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


def test_far_too_large_weights_of_a_learner_are_refused_before_hashing(make_core: Cores) -> None:
    """Hashing the largest Weights, 67 MB, would delay every robot. A policy that a person loads is always hashed."""
    core = make_core()
    junk = bytes(3_000_000)
    core.step([("learner", Weights(2, 0, 0, "0" * 64, junk))], 1.0)
    assert core.counters["weights_refused"] == 1
    with pytest.raises(BundleError, match=r"version 2 have 3,000,000 bytes; allowed: at most 1,04[0-9],[0-9]{3}"):
        core.store.receive(2, "0" * 64, junk)
    with pytest.raises(BundleError, match="hash"):
        core.store.receive(2, "0" * 64, junk, loaded=True)
