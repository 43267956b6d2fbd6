"""Replay finds a missing or changed safety setting, and mistakes in the safety code. It names the first difference."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from td3_robot.bundle import Bundle
from td3_robot.cli.main import main
from td3_robot.config.schema import Config
from td3_robot.driver import contact
from td3_robot.driver.actuator import Actuator
from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.messages import Action
from td3_robot.policy import answers, store
from td3_robot.policy.answers import Answers
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.desk import Desk
from td3_robot.policy.safety import Safety
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.policy.store import PolicyStore
from td3_robot.policy.watch import Watch
from td3_robot.recording.reader import Session
from td3_robot.replay import check as replay
from td3_robot.replay.lives import Life
from td3_robot.safety.lifecycle import Cause, Lifecycle, State, Watchdog
from td3_robot.safety.limits import joined
from td3_robot.safety.state import SafetyState
from td3_robot.specs import RobotSpec

SESSIONS = Path(__file__).parent / "sessions"
Patch = pytest.MonkeyPatch
# The deployed session loads a policy with weights of about 1e30.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


def first(name: str, core: str) -> list[tuple[str, str, str, str, str]]:
    """Return the first difference of each topic that differs."""
    session = Session([SESSIONS / f"{name}.mcap"])
    (report,) = replay.check(session, [core])
    print(replay.text(session, [report]))
    return [(c.topic, *vars(c.first[0]).values()) for c, _ in report.comparisons if not c.same]


@pytest.mark.parametrize("core", ["policy", "driver"])
@pytest.mark.parametrize("name", ["deployed", "restarted"])
def test_unchanged_code_shows_no_difference(name: str, core: str) -> None:
    (report,) = replay.check(Session([SESSIONS / f"{name}.mcap"]), [core])
    assert report.same
    assert not report.notes
    assert report.turns > 900


# -- settings: one setting is missing or changed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("core", "name", "value", "topic"),
    [
        ("policy", "limits", None, "action"),
        ("policy", "rate", None, "action"),
        ("policy", "rate", 12.5, "action"),
        ("policy", "low_pass", None, "action"),
        ("policy", "safe_action", None, "action"),
        ("policy", "safe_action", {"torque": -0.12}, "action"),
        ("policy", "refuse_out_of_range", False, "action"),
        ("policy", "frozen_ms", None, "lifecycle"),
        ("policy", "frozen_ms", 200.0, "action"),
        ("policy", "observation_deadline_ms", None, "lifecycle"),
        ("policy", "observation_deadline_ms", 140.0, "lifecycle"),
        ("policy", "recovery", "automatic", "lifecycle"),
        ("driver", "limits", None, "step"),
        ("driver", "safe_action", None, "step"),
        ("driver", "action_deadline_ms", None, "lifecycle"),
        ("driver", "action_deadline_ms", 120.0, "lifecycle"),
        ("driver", "recovery", "automatic", "lifecycle"),
    ],
)
def test_replay_finds_a_missing_or_changed_setting(
    monkeypatch: Patch, core: str, name: str, value: Any, topic: str
) -> None:
    config = Life.config

    def changed(self: Life) -> Config:
        was: Config = config.fget(self)  # type: ignore[attr-defined]
        return msgspec.structs.replace(was, safety=msgspec.structs.replace(was.safety, **{name: value}))

    monkeypatch.setattr(Life, "config", property(changed))
    found = {item[0]: item for item in first("deployed", core)}
    assert topic in found
    assert re.search(r"Step \d+|leg 0 \d+", found[topic][1]), found[topic]
    assert found[topic][2]


# -- code: each function puts one mistake into the safety code --------------------------------------------------------


def watchdogs_never_fire(patch: Patch) -> None:
    patch.setattr(Watchdog, "check", lambda *_: False)


def watch_never_finds_observations_missing(patch: Patch) -> None:
    patch.setattr(Watch, "missing", lambda *_: False)


def bad_observations_reset_the_watchdog(patch: Patch) -> None:
    take = Watch.take

    def fed(self: Watch, step: Any, safety: Any, now: float) -> str | None:
        self.watchdog.feed(now)
        return take(self, step, safety, now)

    patch.setattr(Watch, "take", fed)


def fault_does_not_block_the_policy(patch: Patch) -> None:
    take = Watch.take

    def careless(self: Watch, step: Any, safety: Any, now: float) -> str | None:
        problem = take(self, step, safety, now)
        return None if problem == self.lifecycle.reason else problem

    patch.setattr(Watch, "take", careless)


def a_fault_ends_without_activate(patch: Patch) -> None:
    feed = Watchdog.feed

    def forgiving(self: Watchdog, now: float) -> None:
        feed(self, now)
        self.lifecycle.recover("it looks good again", now)

    patch.setattr(Watchdog, "feed", forgiving)


def stops_do_nothing(patch: Patch) -> None:
    patch.setattr(Lifecycle, "stop", lambda *_: None)


def stops_do_not_latch(patch: Patch) -> None:
    patch.setattr(Lifecycle, "stopped", property(lambda _: False, lambda *_: None), raising=False)


def stops_of_one_named_robot_do_not_latch(patch: Patch) -> None:
    patch.setattr(Safety, "_latch", lambda *_: "")


def commands_for_one_robot_are_not_relayed(patch: Patch) -> None:
    to_one = Desk._to_one
    patch.setattr(Desk, "_to_one", lambda *it: [out for out in to_one(*it) if not hasattr(out[1], "verb")])


def commands_are_not_relayed(patch: Patch) -> None:
    command = Desk.command
    patch.setattr(Desk, "command", lambda *it: [out for out in command(*it) if not hasattr(out[1], "verb")])


def refusals_have_no_error(patch: Patch) -> None:
    refusal = Desk._refusal
    patch.setattr(Desk, "_refusal", lambda *it: msgspec.structs.replace(refusal(*it), error=""))


def every_state_except_fault_is_active(patch: Patch) -> None:
    patch.setattr(Lifecycle, "active", property(lambda self: self.state is not State.FAULT))


def nan_actions_are_sent(patch: Patch) -> None:
    patch.setattr(answers, "finite", lambda _: True)


def bad_observations_are_answered(patch: Patch) -> None:
    patch.setattr(SafetyFilter, "problem", lambda *_: None)


def actions_are_not_filtered(patch: Patch) -> None:
    patch.setattr(SafetyFilter, "__call__", lambda _, action, *__: action)


def guard_does_not_clip(patch: Patch) -> None:
    accept = Guard.accept

    def trusting(self: Guard, action: Action, now: float) -> Any:
        return None if accept(self, action, now) is None else action.action

    patch.setattr(Guard, "accept", trusting)


def guard_never_requires_the_safe_action(patch: Patch) -> None:
    patch.setattr(Guard, "safe", property(lambda _: False))


def guard_does_not_wait_for_the_first_action(patch: Patch) -> None:
    patch.setattr(Guard, "begin", lambda _: None)


def late_actions_are_applied(patch: Patch) -> None:
    answer = SourceCore._answer

    def eager(self: SourceCore, action: Action, now: float) -> None:
        if self.newest:
            action = msgspec.structs.replace(action, answers=self.newest.sequence)
        answer(self, action, now)

    patch.setattr(SourceCore, "_answer", eager)


def stops_by_a_robot_are_not_sent(patch: Patch) -> None:
    step = SourceCore.step
    patch.setattr(SourceCore, "step", lambda *it: [out for out in step(*it) if not hasattr(out[1], "verb")])


def faults_do_nothing(patch: Patch) -> None:
    patch.setattr(Lifecycle, "fault", lambda *_: None)


def robots_receive_no_actions(patch: Patch) -> None:
    patch.setattr(Actuator, "apply", lambda *_: None)


def the_safe_action_waits_for_the_next_step(patch: Patch) -> None:
    patch.setattr(Actuator, "follow_guard", lambda _: None)


def safe_action_between_steps_is_wrong(patch: Patch) -> None:
    patch.setattr(Actuator, "make_safe", lambda self: self.apply(self._body.commanded))


def robots_are_reset_without_the_safe_action(patch: Patch) -> None:
    patch.setattr(Actuator, "made_safe", property(lambda _: True, lambda *_: None), raising=False)


def a_driver_does_not_wait_for_the_server(patch: Patch) -> None:
    patch.setattr(contact, "HOLD_OFF", 0.0)


def a_driver_waits_too_long_for_the_server(patch: Patch) -> None:
    patch.setattr(contact, "HOLD_OFF", 1.0)


def stops_by_a_robot_are_not_repeated(patch: Patch) -> None:
    patch.setattr(Actuator, "own_stop", property(lambda _: None, lambda *_: None), raising=False)


def unanswered_steps_are_not_sent_again(patch: Patch) -> None:
    patch.setattr(SourceCore, "_steps_for", lambda *_: [])


def joining_robots_do_not_receive_stops(patch: Patch) -> None:
    join = Desk.join
    patch.setattr(Desk, "join", lambda *it, **named: [join(*it, **named), []][1])


def a_robot_that_leaves_loses_its_fault(patch: Patch) -> None:
    patch.setattr(Safety, "leave", lambda self, name, _: self.watches.pop(name, None))


def a_robot_that_leaves_loses_its_stop(patch: Patch) -> None:
    patch.setattr(
        Desk, "leave", lambda self, peer: [self.robots.pop(peer.name, 0), self._safety.stopped.discard(peer.name)]
    )


def robots_may_send_all_commands(patch: Patch) -> None:
    command = Desk.command

    def obedient(self: Desk, peer: Any, message: Any, now: float) -> Any:
        return self._to_all(peer, message, now)[0] if peer.role == "driver" else command(self, peer, message, now)

    patch.setattr(Desk, "command", obedient)


def robots_may_stop_each_other(patch: Patch) -> None:
    command = Desk.command

    def obedient(self: Desk, peer: Any, message: Any, now: float) -> Any:
        one = peer.role == "driver" and message.target
        return self._to_one(peer, message, now) if one else command(self, peer, message, now)

    patch.setattr(Desk, "command", obedient)


def a_stop_of_all_robots_is_ignored_if_a_robot_sends_it(patch: Patch) -> None:
    command = Desk.command
    patch.setattr(Desk, "command", lambda *it: [] if it[1].role == "driver" else command(*it))


def repeated_steps_count_as_new(patch: Patch) -> None:
    take = Watch.take

    def forgetful(self: Watch, *it: Any) -> str | None:
        self.newest = None
        return take(self, *it)

    patch.setattr(Watch, "take", forgetful)


def old_steps_are_answered(patch: Patch) -> None:
    answer = Answers.answer
    patch.setattr(Answers, "answer", lambda self, peer, step, _, now: answer(self, peer, step, now, now))


def hashes_are_not_checked(patch: Patch) -> None:
    patch.setattr(Bundle, "verified", lambda payload, _, source: Bundle.decode(payload, source))


def weights_of_another_robot_are_served(patch: Patch) -> None:
    patch.setattr(RobotSpec, "difference", lambda *_: None)


def older_weights_are_accepted(patch: Patch) -> None:
    add = PolicyStore.add
    patch.setattr(PolicyStore, "add", lambda self, *it, **named: [setattr(self, "newest", 0), add(self, *it, **named)])


def settings_of_the_deployed_policy_do_not_apply(patch: Patch) -> None:
    patch.setattr(store, "joined", lambda *it, **_: joined(*it))


def a_freeze_does_nothing(patch: Patch) -> None:
    patch.setattr(PolicyStore, "frozen", property(lambda _: False, lambda *_: None), raising=False)


def a_rollback_does_not_freeze(patch: Patch) -> None:
    back = PolicyStore.roll_back
    patch.setattr(PolicyStore, "roll_back", lambda self, *it: [back(self, *it), setattr(self, "frozen", False)][0])


def a_rollback_selects_a_policy_from_the_learner(patch: Patch) -> None:
    patch.setattr(PolicyStore, "loaded", property(lambda _: [], lambda *_: None), raising=False)


def a_withdrawal_is_not_stored(patch: Patch) -> None:
    patch.setattr(PolicyStore, "withdrawn", property(lambda _: (), lambda *_: None), raising=False)


def a_withdrawn_policy_is_served_again(patch: Patch) -> None:
    resume = PolicyCore.resume

    def forgetful(self: PolicyCore, state: SafetyState, now: float) -> list[str]:
        return resume(self, dataclasses.replace(without(state, Cause.INACTIVE), withdrawn=()), now)

    drop_cause(patch, Cause.INACTIVE)
    patch.setattr(PolicyCore, "resume", forgetful)


def a_restart_restores_nothing(patch: Patch) -> None:
    patch.setattr(PolicyCore, "resume", lambda *_: [])


def a_restart_does_not_restore_stops_of_one_named_robot(patch: Patch) -> None:
    restore = Safety.restore
    patch.setattr(
        Safety, "restore", lambda self, state, now: restore(self, dataclasses.replace(state, stopped=()), now)
    )


def without(state: SafetyState, cause: Cause) -> SafetyState:
    """Return the state. If its ``server`` has this ``cause``, the returned state has ``server=None``."""
    return dataclasses.replace(state, server=None) if state.server and state.server.cause is cause else state


def drop_cause(patch: Patch, cause: Cause) -> None:
    kept = Safety.state
    patch.setattr(Safety, "state", lambda self, **it: without(kept(self, **it), cause))


def a_restart_does_not_restore_the_stop_of_all(patch: Patch) -> None:
    drop_cause(patch, Cause.STOP)


def a_restart_does_not_restore_the_inactive_state(patch: Patch) -> None:
    drop_cause(patch, Cause.INACTIVE)


def a_shutdown_clears_the_state_of_the_server(patch: Patch) -> None:
    kept = Safety.state

    def forgetful(self: Safety, **it: Any) -> SafetyState:
        state = kept(self, **it)
        over = self.lifecycle.state is State.FINALIZED
        return dataclasses.replace(state, server=None) if over else state

    patch.setattr(Safety, "state", forgetful)


@pytest.mark.parametrize(
    ("core", "mistake"),
    [
        ("policy", watchdogs_never_fire),
        ("policy", watch_never_finds_observations_missing),
        ("policy", bad_observations_reset_the_watchdog),
        ("policy", fault_does_not_block_the_policy),
        ("policy", a_fault_ends_without_activate),
        ("policy", stops_do_nothing),
        ("policy", stops_do_not_latch),
        ("policy", stops_of_one_named_robot_do_not_latch),
        ("policy", commands_for_one_robot_are_not_relayed),
        ("policy", commands_are_not_relayed),
        ("policy", refusals_have_no_error),
        ("policy", every_state_except_fault_is_active),
        ("policy", nan_actions_are_sent),
        ("policy", bad_observations_are_answered),
        ("policy", actions_are_not_filtered),
        ("driver", watchdogs_never_fire),
        ("driver", a_fault_ends_without_activate),
        ("driver", stops_do_nothing),
        ("driver", stops_do_not_latch),
        ("driver", every_state_except_fault_is_active),
        ("driver", guard_does_not_clip),
        ("driver", guard_never_requires_the_safe_action),
        ("driver", guard_does_not_wait_for_the_first_action),
        ("driver", late_actions_are_applied),
        ("driver", stops_by_a_robot_are_not_sent),
        ("driver", faults_do_nothing),
        ("driver", robots_receive_no_actions),
        ("driver", the_safe_action_waits_for_the_next_step),
        ("driver", safe_action_between_steps_is_wrong),
        ("driver", robots_are_reset_without_the_safe_action),
    ],
    ids=lambda item: item if isinstance(item, str) else item.__name__,
)
def test_replay_finds_a_mistake_in_the_safety_code(
    monkeypatch: Patch, core: str, mistake: Callable[[Patch], None]
) -> None:
    is_found(monkeypatch, "deployed", core, mistake)


@pytest.mark.parametrize(
    ("core", "mistake"),
    [
        ("policy", joining_robots_do_not_receive_stops),
        ("policy", a_robot_that_leaves_loses_its_fault),
        ("policy", a_robot_that_leaves_loses_its_stop),
        ("policy", robots_may_send_all_commands),
        ("policy", robots_may_stop_each_other),
        ("policy", a_stop_of_all_robots_is_ignored_if_a_robot_sends_it),
        ("policy", repeated_steps_count_as_new),
        ("policy", old_steps_are_answered),
        ("policy", hashes_are_not_checked),
        ("policy", weights_of_another_robot_are_served),
        ("policy", older_weights_are_accepted),
        ("policy", settings_of_the_deployed_policy_do_not_apply),
        ("policy", a_freeze_does_nothing),
        ("policy", a_rollback_does_not_freeze),
        ("policy", a_rollback_selects_a_policy_from_the_learner),
        ("policy", a_withdrawal_is_not_stored),
        ("policy", a_withdrawn_policy_is_served_again),
        ("policy", a_restart_restores_nothing),
        ("policy", a_restart_does_not_restore_stops_of_one_named_robot),
        ("policy", a_restart_does_not_restore_the_stop_of_all),
        ("policy", a_restart_does_not_restore_the_inactive_state),
        ("policy", a_shutdown_clears_the_state_of_the_server),
        ("driver", a_driver_does_not_wait_for_the_server),
        ("driver", a_driver_waits_too_long_for_the_server),
        ("driver", stops_by_a_robot_are_not_repeated),
        ("driver", unanswered_steps_are_not_sent_again),
    ],
    ids=lambda item: item if isinstance(item, str) else item.__name__,
)
def test_replay_of_restarts_and_new_policies_finds_a_mistake_in_the_safety_code(
    monkeypatch: Patch, core: str, mistake: Callable[[Patch], None]
) -> None:
    is_found(monkeypatch, "restarted", core, mistake)


def is_found(patch: Patch, name: str, core: str, mistake: Callable[[Patch], None]) -> None:
    mistake(patch)
    found = first(name, core)
    assert found
    for _, message, field, _, _ in found:
        assert re.search(r"Step \d+|leg 0 \d+|the beginning", message), found
        assert field


def test_update_replaces_only_the_references_of_the_core_that_differs(
    monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The references are the expected outputs of a core. The option ``--update`` does not change recorded messages.

    So the inputs of the other cores stay the same.
    """
    path = tmp_path / "deployed.mcap"
    path.write_bytes((SESSIONS / "deployed.mcap").read_bytes())
    stops_of_one_named_robot_do_not_latch(monkeypatch)
    actions_are_not_filtered(monkeypatch)
    assert main(["replay", str(path)]) == 1
    assert main(["replay", str(path), "--update"]) == 0
    text = capsys.readouterr().out
    assert "new references: reference/policy/0/action, reference/policy/0/" in text
    assert main(["replay", str(path)]) == 0
    now = path.read_bytes()
    assert main(["replay", str(path), "--update"]) == 0
    assert path.read_bytes() == now
    monkeypatch.undo()
    assert main(["replay", str(path)]) == 1  # the unchanged code now differs from the new references
