"""The states of a node that moves a robot, and its watchdog."""

from __future__ import annotations

import pytest

from td3_robot.errors import LifecycleError
from td3_robot.messages import Command
from td3_robot.safety.commands import carry_out
from td3_robot.safety.lifecycle import Lifecycle, State, Watchdog

UNCONFIGURED, INACTIVE, ACTIVE, FAULT, FINALIZED = State


def at(state: State) -> Lifecycle:
    """Return a lifecycle in the given state."""
    lifecycle = Lifecycle("node")
    for verb in {
        UNCONFIGURED: [],
        INACTIVE: ["configure"],
        ACTIVE: ["configure", "activate"],
        FAULT: ["configure", "activate"],
        FINALIZED: ["shutdown"],
    }[state]:
        lifecycle.command(verb, 0.0)
    if state == FAULT:
        lifecycle.fault("broken", 0.0)
    lifecycle.changes()
    assert lifecycle.state == state
    return lifecycle


@pytest.mark.parametrize(
    ("state", "verb", "then"),
    [
        (UNCONFIGURED, "configure", INACTIVE),
        (UNCONFIGURED, "activate", None),
        (UNCONFIGURED, "deactivate", None),
        (UNCONFIGURED, "reset", UNCONFIGURED),
        (UNCONFIGURED, "estop", FAULT),
        (UNCONFIGURED, "shutdown", FINALIZED),
        (INACTIVE, "configure", INACTIVE),
        (INACTIVE, "activate", ACTIVE),
        (INACTIVE, "deactivate", INACTIVE),
        (INACTIVE, "reset", INACTIVE),
        (INACTIVE, "estop", FAULT),
        (INACTIVE, "shutdown", FINALIZED),
        (ACTIVE, "configure", None),
        (ACTIVE, "activate", ACTIVE),
        (ACTIVE, "deactivate", INACTIVE),
        (ACTIVE, "reset", ACTIVE),
        (ACTIVE, "estop", FAULT),
        (ACTIVE, "shutdown", FINALIZED),
        (FAULT, "configure", None),
        (FAULT, "activate", ACTIVE),
        (FAULT, "deactivate", INACTIVE),
        (FAULT, "reset", INACTIVE),
        (FAULT, "estop", FAULT),
        (FAULT, "shutdown", FINALIZED),
        (FINALIZED, "configure", None),
        (FINALIZED, "activate", None),
        (FINALIZED, "deactivate", None),
        (FINALIZED, "reset", FINALIZED),
        (FINALIZED, "estop", FINALIZED),
        (FINALIZED, "shutdown", FINALIZED),
    ],
)
def test_each_command_in_each_state_has_the_expected_effect_or_is_refused(
    state: str, verb: str, then: str | None
) -> None:
    lifecycle = at(state)
    if then is None:
        with pytest.raises(LifecycleError, match=f"cannot {verb}, its state is {state}"):
            lifecycle.command(verb, 1.5, "because")
        assert (lifecycle.state, lifecycle.changes()) == (state, [])
        return
    lifecycle.command(verb, 1.5, "because")
    assert lifecycle.state == then
    changes = lifecycle.changes()
    assert len(changes) == (then != state or (state, verb) == (FAULT, "estop"))
    for change in changes:
        assert (change.node, change.previous, change.state, change.stamp) == ("node", state, then, 1_500_000_000)
        assert "because" in change.reason
    assert lifecycle.changes() == []


def test_an_emergency_stop_holds_until_a_reset() -> None:
    lifecycle = at(ACTIVE)
    lifecycle.command("estop", 1.0, "smoke")
    for verb in ("activate", "configure", "deactivate"):
        with pytest.raises(
            LifecycleError, match=r"emergency stop is in force \(emergency stop: smoke\); reset it first"
        ):
            lifecycle.command(verb, 2.0)
    lifecycle.recover("actions are back", 3.0)
    assert lifecycle.state == FAULT
    lifecycle.command("reset", 4.0)
    assert lifecycle.state == INACTIVE
    lifecycle.command("activate", 5.0)
    assert lifecycle.active


def test_reset_after_a_stop_does_not_configure_a_node() -> None:
    lifecycle = at(UNCONFIGURED)
    lifecycle.command("estop", 0.0)
    lifecycle.command("reset", 0.0)
    assert lifecycle.state == UNCONFIGURED


@pytest.mark.parametrize("state", [UNCONFIGURED, INACTIVE, FAULT, FINALIZED])
def test_an_error_changes_only_an_active_node_to_the_state_fault(state: str) -> None:
    lifecycle = at(state)
    lifecycle.fault("late", 1.0)
    assert lifecycle.changes() == []


def test_the_list_of_unread_changes_is_bounded() -> None:
    lifecycle = at(INACTIVE)
    for _ in range(1000):
        lifecycle.command("activate", 0.0)
        lifecycle.command("deactivate", 0.0)
    assert len(lifecycle.changes()) <= 101


def test_the_watchdog_fires_after_its_deadline() -> None:
    """The deadline is 0.1 s, and the feeds come at 1.0 and 1.05. So the watchdog fires after 1.15."""
    lifecycle = at(ACTIVE)
    watchdog = Watchdog(lifecycle, "action", 0.1)
    assert watchdog.due is None  # not fed yet
    assert not watchdog.check(99.0)
    watchdog.feed(1.0)
    watchdog.feed(1.05)
    assert watchdog.due == pytest.approx(1.15)
    assert not watchdog.check(1.1499)
    assert watchdog.check(1.1501)
    assert lifecycle.state == FAULT
    assert lifecycle.reason == "no action for 100 ms"
    assert not watchdog.check(2.0)  # it fires once
    for number in range(100):  # feeding alone does not end the fault
        watchdog.feed(2.0 + number * 0.01)
    assert lifecycle.state == FAULT
    watchdog.command("activate", 4.0, "")
    assert not watchdog.check(9.0)


def test_automatic_recovery_needs_feeds_without_a_gap() -> None:
    """Recovery needs feeds for 0.3 s, with no gap above 0.1 s. The 0.3 s begin anew after the gap from 2.2 to 2.35."""
    lifecycle = at(ACTIVE)
    watchdog = Watchdog(lifecycle, "action", 0.1, 0.3)
    watchdog.feed(1.0)
    assert watchdog.check(1.2)
    for now in (2.0, 2.08, 2.16, 2.2, 2.35, 2.44, 2.53, 2.62):
        watchdog.feed(now)
        assert lifecycle.state == FAULT
    watchdog.feed(2.66)
    assert lifecycle.active
    assert "have come for 300 ms" in lifecycle.reason


def test_after_a_suspension_the_last_feed_is_too_old() -> None:
    """The clock continues to run while the process is suspended."""
    lifecycle = at(ACTIVE)
    watchdog = Watchdog(lifecycle, "action", 0.1)
    watchdog.feed(1.0)
    assert watchdog.check(1e6)


def test_a_refusal_in_the_log_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A peer chooses the reason of a stop, so the reason can contain control characters."""
    lifecycle = Lifecycle("policy")
    verbs = {"activate": lambda command, now: lifecycle.command(command.verb, now)}
    lifecycle.stop("x\ny\x1b[31m", 0.0)
    with caplog.at_level("INFO"):
        reply = carry_out(Command(1, "", "activate", "", 0, "", b""), "operator", verbs, lifecycle, dict, 1.0)
    assert "an emergency stop is in force" in reply.error
    [line] = [record.getMessage() for record in caplog.records if record.name == "td3_robot.safety.commands"]
    assert line.isprintable()
