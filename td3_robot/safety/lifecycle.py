"""The states of a node that moves a robot, as in ROS 2's managed nodes, and the watchdog that takes it to FAULT.

    unconfigured ── configure ──► inactive ── activate ──► active
                                     ▲  ◄── deactivate ──    │
                                     │                       ▼  a deadline missed, an error
                                     └─ reset, deactivate ─ fault ── activate ──► active
    any ── estop ──► fault, which then only reset leaves          any ── shutdown ──► finalized

Pure: the time is told. FAULT is the error processing of ROS 2; only in ``active`` does a policy move the robot.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from td3_robot.errors import LifecycleError
from td3_robot.messages import LifecycleChange

log = logging.getLogger(__name__)

UNCONFIGURED, INACTIVE, ACTIVE, FAULT, FINALIZED = "unconfigured", "inactive", "active", "fault", "finalized"

_COMMANDS = {
    "configure": ((UNCONFIGURED,), INACTIVE),
    "activate": ((INACTIVE, FAULT), ACTIVE),
    "deactivate": ((ACTIVE, FAULT), INACTIVE),
    "reset": ((FAULT,), INACTIVE),
    "shutdown": ((UNCONFIGURED, INACTIVE, ACTIVE, FAULT), FINALIZED),
}
STOP = "emergency stop: "
"""How the reason of a stopped node begins."""
_KEPT = 100  # changes that nobody has fetched


class Lifecycle:
    """One node's state. Every change is logged, and kept until :meth:`changes` is called.

    Attributes:
        node: whose it is.
        state: one of the five.
        stopped: an emergency stop is in force.
        reason: why it came to this state.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.state = UNCONFIGURED
        self.stopped = False
        self.reason = "started"
        self._configured = False
        self._changes: list[LifecycleChange] = []

    @property
    def active(self) -> bool:
        return self.state == ACTIVE

    @property
    def trouble(self) -> str:
        """One line for a person; empty when all is well."""
        return "" if self.active else f"{self.state}: {self.reason}"

    def command(self, verb: str, now: float, reason: str = "") -> None:
        """Do what an operator asks: configure, activate, deactivate, reset, estop or shutdown; ``now`` in seconds.

        What is already so is no error.

        Raises:
            LifecycleError: not from this state.
        """
        reason = reason or f"{verb} was asked for"
        if verb == "estop":
            self.stop(reason, now)
            return
        sources, target = _COMMANDS[verb]
        if self.stopped and verb in ("activate", "deactivate", "configure"):
            raise LifecycleError(f"{self.node}: an emergency stop is in force ({self.reason}); reset it first")
        if verb == "reset":
            self.stopped = False
            target = INACTIVE if self._configured else UNCONFIGURED
            if self.state != FAULT:
                return
        if self.state == target:
            return
        if self.state not in sources:
            allowed = ", ".join(verb for verb, (states, _) in _COMMANDS.items() if self.state in states) or "nothing"
            raise LifecycleError(f"{self.node}: cannot {verb}, its state is {self.state}; allowed: {allowed}")
        if verb == "deactivate" and self.state == FAULT:  # which may still be there
            reason = f"{reason} (was in fault: {self.reason})"
        self._configured = self._configured or verb == "configure"
        self._go(target, reason, now)

    def fault(self, reason: str, now: float) -> None:
        """Something needed is missing: only an active node faults."""
        if self.state == ACTIVE:
            self._go(FAULT, reason, now)

    def recover(self, reason: str, now: float) -> None:
        """Active again without being asked; not after an emergency stop."""
        if self.state == FAULT and not self.stopped:
            self._go(ACTIVE, reason, now)

    def stop(self, reason: str, now: float) -> None:
        """Emergency stop: from any state but finalized, at once, and until it is reset."""
        if self.state != FINALIZED and not self.stopped:
            self.stopped = True
            self._go(FAULT, f"{STOP}{reason}", now)

    def changes(self) -> list[LifecycleChange]:
        """What changed since the last call, oldest first."""
        taken, self._changes = self._changes, []
        return taken

    def _go(self, state: str, reason: str, now: float) -> None:
        before, reason = self.state, reason[:2000]
        self.state, self.reason = state, reason
        self._changes = [*self._changes[-_KEPT:], LifecycleChange(self.node, before, state, reason, int(now * 1e9))]
        said = reason if reason.isprintable() else repr(reason)  # a peer may have written it
        log.log(logging.WARNING if state == FAULT else logging.INFO, "%s: %s -> %s: %s", self.node, before, state, said)


@dataclass
class Watchdog:
    """Takes a lifecycle to FAULT when what feeds it is missing for longer than its deadline.

    It is armed by the first feed, so that nothing is missed before it has ever been there, or by :meth:`arm`.

    Attributes:
        lifecycle: what it watches over.
        what: the name of what feeds it.
        deadline_s: in seconds; None watches nothing.
        recovery_s: how long the feeds must have come back without a pause to leave FAULT; None: they do not.
        fed: when it was last fed; None while disarmed.
    """

    lifecycle: Lifecycle
    what: str
    deadline_s: float | None = None
    recovery_s: float | None = None
    fed: float | None = None
    _back_since: float | None = None

    @property
    def due(self) -> float | None:
        """When it will bite; None if it will not."""
        if self.deadline_s is None or self.fed is None or not self.lifecycle.active:
            return None
        return self.fed + self.deadline_s

    def feed(self, now: float) -> None:
        """What is watched for has come."""
        paused = self.fed is None or (self.deadline_s is not None and now - self.fed > self.deadline_s)
        self.fed = now
        if self.lifecycle.active or paused:
            self._back_since = None
        if self.lifecycle.state != FAULT or self.recovery_s is None:
            return
        if self._back_since is None:
            self._back_since = now
        if now - self._back_since >= self.recovery_s:
            self._back_since = None
            self.lifecycle.recover(f"{self.what}s have come for {self.recovery_s * 1e3:.0f} ms", now)

    def bites(self, now: float, why: str | None = None) -> bool:
        """Look at the time; whether this took the lifecycle to FAULT; ``why`` says why nothing came."""
        if self.due is None or now <= self.due:
            return False
        assert self.deadline_s is not None
        reason = f"no {self.what} for {self.deadline_s * 1e3:.0f} ms"
        self.lifecycle.fault(f"{reason}: {why}" if why else reason, now)
        return True

    def arm(self, now: float) -> None:
        """Count from here, without a feed, if nothing has fed it yet."""
        self.fed = now if self.fed is None else self.fed

    def interrupt(self) -> None:
        """Something is wrong at this moment: recovery begins anew."""
        self._back_since = None

    def put_off(self, now: float) -> None:
        """Nothing could come until now, which is no fault: an armed watchdog counts from here."""
        if self.fed is not None and self.lifecycle.active:
            self.fed = now

    def disarm(self) -> None:
        """Wait for a first feed again, as after an explicit activate."""
        self.fed = self._back_since = None
