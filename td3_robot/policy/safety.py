"""Decides which robots a policy may move.

The decision depends on the state of the server, on its :class:`Watch` over each source, and on stops of single sources.
A *robot* in this file is a source: a driver or a simulator process.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator

from td3_robot.core_types import Farewell
from td3_robot.errors import LifecycleError
from td3_robot.messages import Command, LifecycleChange, Step
from td3_robot.policy.watch import Watch
from td3_robot.safety.lifecycle import Cause, Lifecycle
from td3_robot.safety.state import SafetyState

log = logging.getLogger(__name__)

_AWAY = 1024  # maximum number of watches over absent robots; stopped robots do not count
_STOPS = 1024  # maximum number of individually stopped robots
_ENDS = {
    Cause.STOP: "reset, then activate",
    Cause.FAULT: "activate (if recovery is automatic, valid observations also end the fault)",
    Cause.INACTIVE: "activate",
}
"""Maps the cause in the state file to what must happen after a restart before a policy moves the robot again."""


class Safety:
    """Holds all stops and faults of a policy server.

    If a Command stops one robot, the emergency stop holds for the robot's name. This stop also holds if the robot is
    not connected, or if the server has no watch over the robot. A reset with this name ends the stop. A reset of all
    robots ends the stop only if the robot is connected.

    Attributes:
        watches: the watches over robots, by robot name. Without safety settings, only :meth:`restore` begins watches.
    """

    def __init__(self, node: str) -> None:
        self.lifecycle = Lifecycle(node)
        self.watches: dict[str, Watch] = {}
        self.stopped: set[str] = set()

    @property
    def due(self) -> float | None:
        """Time of the next necessary call of :meth:`missing`, in seconds; None if no call is necessary."""
        dues = (watch.watchdog.due for watch in self.watches.values())
        return min((due for due in dues if due is not None), default=None)

    def acts(self, name: str) -> bool:
        """Return whether the server is active and this robot is not individually stopped."""
        return self.lifecycle.active and name not in self.stopped

    def stops(self, name: str) -> bool:
        """Return whether an emergency stop holds for this robot."""
        watch = self.watches.get(name)
        return self.lifecycle.stopped or name in self.stopped or bool(watch and watch.lifecycle.stopped)

    def watch(self, name: str, now: float) -> Watch:
        """Begin to watch over a robot."""
        watch = self.watches[name] = Watch(f"{self.lifecycle.node}/{name}", now)
        return watch

    def missing(self, now: float) -> Iterator[tuple[str, Step]]:
        """Yield each robot whose observation has become overdue at ``now`` (s), with the robot's newest Step."""
        for name, watch in self.watches.items():
            if watch.missing(now) and watch.newest:
                yield name, watch.newest

    def robot_in_fault(self, name: str) -> None:
        """Record that a robot has reported a fault.

        Then the robot's watch does not mistake missing observations for a reset.
        """
        if watch := self.watches.get(name):
            watch.end_reset()

    def changes(self) -> list[LifecycleChange]:
        """Return the changes of state since the last call."""
        changes = self.lifecycle.changes()
        for watch in self.watches.values():
            changes += watch.lifecycle.changes()
        return changes

    # -- commands ------------------------------------------------------------------------------------------------

    def command(self, name: str, command: Command, now: float, *, watched: bool = True) -> str:
        """Let a Command begin or end the individual stop of a robot.

        If ``watched``, also apply the Command to the robot's watch.

        Returns:
            The reason why the server refuses the Command; empty if the server accepts it.
        """
        if error := self._latch(name, command):
            return error
        watch = self.watches.get(name)
        # A Command ``deactivate`` without a target deactivates the server itself, not the watches.
        verbs = ("activate", "reset", "estop", "deactivate") if command.target else ("activate", "reset", "estop")
        try:
            if watched and watch and command.verb in verbs:
                watch.watchdog.command(command.verb, now, command.reason)
        except LifecycleError as error:
            return str(error)
        return ""

    def _latch(self, name: str, command: Command) -> str:
        """Let a Command begin or end the individual stop of a robot. Return the error, or an empty text."""
        if command.verb == "reset":
            self.stopped.discard(name)
        elif command.verb in ("configure", "activate", "deactivate") and name in self.stopped:
            return f"{self.lifecycle.node}/{name[:64]}: an emergency stop is in force; reset it first"
        elif command.verb == "estop" and command.target:
            if len(self.stopped) >= _STOPS and name not in self.stopped:
                return f"{_STOPS} robots are individually stopped already; stop all with estop, without a target"
            self.stopped.add(name)
            log.warning("%s: emergency stop of %r: %r", self.lifecycle.node, name[:64], command.reason[:200])
        return ""

    # -- robots that leave ---------------------------------------------------------------------------------------

    def leave(self, name: str, farewell: Farewell) -> None:
        """Record that a robot has left. Forget its watch if the watch is in the state active.

        Otherwise keep the watch, so that the robot cannot end a fault by leaving and returning. Also keep an active
        watch if the connection is lost during a reset. A source cannot send heartbeats while its ``reset()`` runs, so
        a source in a reset can look lost.
        """
        watch = self.watches.pop(name, None)
        if watch and (not watch.lifecycle.active or (watch.resetting and farewell is not Farewell.STOPPED)):
            self.watches[name] = watch  # at the end, because the order of the map shows which robots left last

    def forget_absent_robots(self, here: Container[str]) -> None:
        """Keep at most _AWAY watches of absent robots: forget the robots that left first.

        The watches of stopped robots always stay. They do not count for _AWAY.
        """
        away = [name for name, it in self.watches.items() if name not in here and not it.lifecycle.stopped]
        for name in away[:-_AWAY]:
            log.warning("%s: forgets robot %r, because %d others disconnected later", self.lifecycle.node, name, _AWAY)
            del self.watches[name]

    # -- restarts ------------------------------------------------------------------------------------------------

    def state(self) -> SafetyState:
        """Return the stops and faults that the server must keep across a restart."""
        return SafetyState(
            server=self.lifecycle.held,
            sources={name: held for name, watch in self.watches.items() if (held := watch.lifecycle.held)},
            stopped=tuple(sorted(self.stopped)),
        )

    def restore(self, state: SafetyState, now: float) -> list[str]:
        """Restore the robots' stops, faults and deactivations after a restart. Return lines for the log."""
        lines = []
        for name, held in state.sources.items():
            lifecycle = self.watch(name, now).lifecycle
            if held.cause is Cause.STOP:
                lifecycle.stop(held.reason, now)
            elif held.cause is Cause.FAULT:
                lifecycle.fault(held.reason, now)
            else:
                lifecycle.command("deactivate", now, "it was not active before the restart")
            lines.append(f"no policy moves {name!r} until {_ENDS[held.cause]}: {lifecycle.reason}")
        if state.stopped:
            self.stopped.update(state.stopped)
            lines.append(f"individually stopped, until a reset: {', '.join(state.stopped)}")
        return lines
