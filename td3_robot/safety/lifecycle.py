"""The states of a node that moves a robot, as in ROS 2's managed nodes, and the watchdog that sets FAULT.

    unconfigured ── configure ──► inactive ── activate ──► active
                                     ▲  ◄── deactivate ──    │
                                     │                       ▼  a missed deadline, an error
                                     └─ reset, deactivate ─ fault ── activate ──► active
    any ── estop ──► fault, which only reset and shutdown end     any ── shutdown ──► finalized

A finalized node never leaves its state. Nothing here reads a clock: callers pass the time. FAULT corresponds to the
error processing of ROS 2. A policy moves the robot only in ``active``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum

from td3_robot.errors import LifecycleError
from td3_robot.messages import LifecycleChange

log = logging.getLogger(__name__)


class State(str, Enum):
    """The state of a node; the values are the words on the wire."""

    UNCONFIGURED = "unconfigured"
    INACTIVE = "inactive"
    ACTIVE = "active"
    FAULT = "fault"
    FINALIZED = "finalized"

    __str__ = str.__str__


class Cause(str, Enum):
    """Why no policy moves a robot. The cause decides which command or event lets a policy move the robot again."""

    STOP = "stop"  # an emergency stop: only a reset ends it
    FAULT = "fault"  # an error, or missing data
    INACTIVE = "inactive"  # the node waits until a person activates it

    __str__ = str.__str__


STOP_PREFIX = "emergency stop: "
"""The first words of the text that people read about an emergency stop."""


@dataclass(frozen=True)
class Held:
    """Why no policy moves a robot. Code checks only the cause. The reason and ``str()`` are for people."""

    cause: Cause
    reason: str = ""

    def __str__(self) -> str:
        return f"{STOP_PREFIX}{self.reason}" if self.cause is Cause.STOP else self.reason


_COMMANDS: dict[str, dict[State, State]] = {
    "configure": {State.UNCONFIGURED: State.INACTIVE, State.INACTIVE: State.INACTIVE},
    "activate": {State.INACTIVE: State.ACTIVE, State.FAULT: State.ACTIVE, State.ACTIVE: State.ACTIVE},
    "deactivate": {State.ACTIVE: State.INACTIVE, State.FAULT: State.INACTIVE, State.INACTIVE: State.INACTIVE},
    "reset": {**{state: state for state in State}, State.FAULT: State.INACTIVE},
    "shutdown": dict.fromkeys(State, State.FINALIZED),
}
"""For each command except estop: its changes of state, from old to new. In a state without an entry, the node refuses
the command."""
_REFUSED_WHILE_STOPPED = ("configure", "activate", "deactivate")
_LONGEST_REASON = 2000  # characters
_KEPT = 100  # how many changes, besides the newest, to keep for :meth:`Lifecycle.changes`


class Lifecycle:
    """The state of one node. It logs every change, and stores the newest changes until a caller fetches them.

    Attributes:
        held: why no policy moves the robot. ``held`` is None while the node is unconfigured or active. A shutdown does
            not change ``held``. If the cause is INACTIVE, ``held.reason`` is empty.
        reason: reason of the last change of the state, for people.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.state = State.UNCONFIGURED
        self.held: Held | None = None
        self.reason = "started"
        self._configured = False
        self._changes: list[LifecycleChange] = []

    @property
    def active(self) -> bool:
        return self.state is State.ACTIVE

    @property
    def stopped(self) -> bool:
        return self.held is not None and self.held.cause is Cause.STOP

    @property
    def trouble(self) -> str:
        """One line for a person; empty while the node is active."""
        return "" if self.active else f"{self.state}: {self.reason}"

    def command(self, verb: str, now: float, reason: str = "") -> None:
        """Apply configure, activate, deactivate, reset, estop or shutdown at ``now`` (s).

        If the node is already in the target state, nothing changes.

        Raises:
            LifecycleError: the state or an emergency stop forbids the command.
        """
        reason = reason or f"{verb} was asked for"
        if verb == "estop":
            self.stop(reason, now)
            return
        if self.stopped and verb in _REFUSED_WHILE_STOPPED:
            raise LifecycleError(f"{self.node}: an emergency stop is in force ({self.reason}); reset it first")
        targets = _COMMANDS[verb]
        if self.state not in targets:
            useful = (verb for verb, to in _COMMANDS.items() if to.get(self.state, self.state) is not self.state)
            allowed = ", ".join(useful) or "nothing"
            raise LifecycleError(f"{self.node}: cannot {verb}, its state is {self.state}; allowed: {allowed}")
        target = targets[self.state]
        if verb == "reset" and self.state is State.FAULT and not self._configured:
            target = State.UNCONFIGURED
        if verb == "deactivate" and self.state is State.FAULT:  # the fault may persist, so the reason names it
            reason = f"{reason} (was in fault: {self.reason})"
        self._configured = self._configured or verb == "configure"
        if target is not self.state:
            self._change(target, reason, now, Cause.INACTIVE if target is State.INACTIVE else None)

    def fault(self, reason: str, now: float) -> None:
        """Take an active node to FAULT because of an error or missing data."""
        if self.state is State.ACTIVE:
            self._change(State.FAULT, reason, now, Cause.FAULT)

    def recover(self, reason: str, now: float) -> None:
        """Return from FAULT to active without a command; never after an emergency stop."""
        if self.state is State.FAULT and not self.stopped:
            self._change(State.ACTIVE, reason, now)

    def stop(self, reason: str, now: float) -> None:
        """Make an emergency stop: FAULT until a reset or a shutdown. A finalized node does not change."""
        if self.state is not State.FINALIZED and not self.stopped:
            self._change(State.FAULT, reason[: _LONGEST_REASON - len(STOP_PREFIX)], now, Cause.STOP)

    def changes(self) -> list[LifecycleChange]:
        """Return the changes since the last call, the oldest first."""
        taken, self._changes = self._changes, []
        return taken

    def _change(self, state: State, reason: str, now: float, cause: Cause | None = None) -> None:
        before, reason = self.state, reason[:_LONGEST_REASON]
        if state is not State.FINALIZED:
            self.held = Held(cause, "" if cause is Cause.INACTIVE else reason) if cause else None
        self.state, self.reason = state, str(self.held) if cause is Cause.STOP else reason
        change = LifecycleChange(self.node, before.value, state.value, self.reason, int(now * 1e9))
        self._changes = [*self._changes[-_KEPT:], change]
        level = logging.WARNING if state is State.FAULT else logging.INFO
        shown = self.reason if self.reason.isprintable() else repr(self.reason)  # a peer may have written it
        log.log(level, "%s: %s -> %s: %s", self.node, before, state, shown)


@dataclass
class Watchdog:
    """Takes a lifecycle to FAULT when no feed (valid data) comes for longer than the deadline.

    The first feed arms the watchdog. Before the first feed, the deadline is not active. :meth:`arm` arms the watchdog
    without a feed.

    Attributes:
        what: name of the feed.
        deadline_s: longest time between two feeds, in seconds; None: the watchdog is off.
        recovery_s: FAULT ends after this many seconds of feeds without a pause; None: feeds never end FAULT.
        fed: time (s) from which the deadline counts: the newest feed, :meth:`arm` or :meth:`put_off`; None while the
            watchdog is not armed.
    """

    lifecycle: Lifecycle
    what: str
    deadline_s: float | None = None
    recovery_s: float | None = None
    fed: float | None = None
    _back_since: float | None = None

    @property
    def due(self) -> float | None:
        """The time (s) at which the deadline passes; None if no deadline is running."""
        if self.deadline_s is None or self.fed is None or not self.lifecycle.active:
            return None
        return self.fed + self.deadline_s

    def feed(self, now: float) -> None:
        """Register a feed that has come at ``now`` (s)."""
        paused = self.fed is None or (self.deadline_s is not None and now - self.fed > self.deadline_s)
        self.fed = now
        if self.lifecycle.active or paused:
            self._back_since = None
        if self.lifecycle.state is not State.FAULT or self.recovery_s is None:
            return
        if self._back_since is None:
            self._back_since = now
        if now - self._back_since >= self.recovery_s:
            self._back_since = None
            self.lifecycle.recover(f"{self.what}s have come for {self.recovery_s * 1e3:.0f} ms", now)

    def check(self, now: float, why: str | None = None) -> bool:
        """If the deadline has passed, take the lifecycle to FAULT and return True. ``why`` says why no feed came."""
        if self.due is None or now <= self.due:
            return False
        assert self.deadline_s is not None
        reason = f"no {self.what} for {self.deadline_s * 1e3:.0f} ms"
        self.lifecycle.fault(f"{reason}: {why}" if why else reason, now)
        return True

    def arm(self, now: float) -> None:
        """Start the deadline without a feed, unless it is already running."""
        self.fed = now if self.fed is None else self.fed

    def interrupt(self) -> None:
        """Record that a problem has occurred. ``recovery_s`` then counts from the next feed."""
        self._back_since = None

    def put_off(self, now: float) -> None:
        """Restart the deadline without a feed, if the watchdog is armed and the lifecycle is active."""
        if self.fed is not None and self.lifecycle.active:
            self.fed = now

    def command(self, verb: str, now: float, reason: str) -> None:
        """Pass a command to the lifecycle, see :meth:`Lifecycle.command`.

        ``activate`` disarms the watchdog until the next feed or :meth:`arm`, unless the lifecycle is already active.
        """
        if verb == "activate" and not self.lifecycle.active:
            self.fed = self._back_since = None
        self.lifecycle.command(verb, now, reason)
