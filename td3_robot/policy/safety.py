"""Decides which robots a policy may move: the server's own state, its watch over each robot, stops of single robots."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator

from td3_robot.errors import LifecycleError
from td3_robot.messages import Command, LifecycleChange, Step
from td3_robot.policy.watch import Watch
from td3_robot.safety.lifecycle import Cause, Held, Lifecycle
from td3_robot.safety.state import SafetyState

log = logging.getLogger(__name__)

_AWAY = 1024  # the most absent robots to remember that no policy may move
_STOPS = 1024  # the most names of individually stopped robots
_LONGEST_REASON = 500  # characters of a reason that is kept over a restart


class Safety:
    """Holds all stops and faults of a policy server.

    An emergency stop of one robot holds for its name, whether the robot is connected or not and whether the server
    watches over it or not. It lasts until a reset of that robot or of all robots.

    Args:
        node: name of the server.

    Attributes:
        lifecycle: of the server itself.
        watches: the watches over robots, by robot name. A robot without anything to watch has none.
        stopped: names of the individually stopped robots.
    """

    def __init__(self, node: str) -> None:
        self.lifecycle = Lifecycle(node)
        self.watches: dict[str, Watch] = {}
        self.stopped: set[str] = set()

    @property
    def due(self) -> float | None:
        """When :meth:`missing` is needed next, in seconds."""
        dues = (watch.watchdog.due for watch in self.watches.values())
        return min((due for due in dues if due is not None), default=None)

    def acts(self, name: str) -> bool:
        """Whether the server is active and this robot is not stopped by its name."""
        return self.lifecycle.active and name not in self.stopped

    def stops(self, name: str) -> bool:
        """Whether an emergency stop holds for this robot."""
        watch = self.watches.get(name)
        return self.lifecycle.stopped or name in self.stopped or bool(watch and watch.lifecycle.stopped)

    def watch(self, name: str, now: float) -> Watch:
        """Begin to watch over a robot."""
        watch = self.watches[name] = Watch(f"{self.lifecycle.node}/{name}", now)
        return watch

    def missing(self, now: float) -> Iterator[tuple[str, Step]]:
        """The robots whose observations this call finds overdue, each with its newest Step."""
        for name, watch in self.watches.items():
            if watch.missing(now) and watch.newest:
                yield name, watch.newest

    def changes(self) -> list[LifecycleChange]:
        """The changes of state since the last call."""
        changes = self.lifecycle.changes()
        for watch in self.watches.values():
            changes += watch.lifecycle.changes()
        return changes

    # -- commands ------------------------------------------------------------------------------------------------

    def command(self, name: str, command: Command, now: float, *, watched: bool = True) -> str:
        """Apply a Command for one robot or for all robots to the stop of one robot and to the watch over it.

        Args:
            name: of the robot.
            command: its target is empty if it is for all robots.
            now: the time, in seconds.
            watched: apply it to the watch over the robot, too.

        Returns:
            Why the server refuses the Command; empty if it does not.
        """
        if error := self._latch(name, command):
            return error
        watch = self.watches.get(name)
        # A Command for all robots does not deactivate a watch: the server itself is inactive then.
        verbs = ("activate", "reset", "estop", "deactivate") if command.target else ("activate", "reset", "estop")
        try:
            if watched and watch and command.verb in verbs:
                watch.command(command.verb, now, command.reason)
        except LifecycleError as error:
            return str(error)
        return ""

    def _latch(self, name: str, command: Command) -> str:
        """Apply a Command to the stop of one robot. Returns the error, or an empty text."""
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

    def leave(self, name: str) -> None:
        """Forget the active watch of a robot that left. Keep any other watch, so that a return ends no fault."""
        watch = self.watches.pop(name, None)
        if watch and not watch.lifecycle.active:
            self.watches[name] = watch  # at the end: the robots that left last

    def forget_the_longest_away(self, here: Container[str]) -> None:
        """Of the robots that are not ``here``, remember the last _AWAY. An emergency stop is never forgotten."""
        away = [name for name, it in self.watches.items() if name not in here and not it.lifecycle.stopped]
        for name in away[:-_AWAY]:
            log.warning("%s: forgets %r: %d robots that left later are remembered", self.lifecycle.node, name, _AWAY)
            del self.watches[name]

    # -- restarts ------------------------------------------------------------------------------------------------

    def state(self, *, frozen: bool, withdrawn: tuple[str, ...]) -> SafetyState:
        """The state that a restart must keep."""
        watches = ((name, _kept(watch.lifecycle, _LONGEST_REASON)) for name, watch in self.watches.items())
        return SafetyState(
            server=_kept(self.lifecycle),
            sources={name: held for name, held in watches if held},
            stopped=tuple(sorted(self.stopped)),
            frozen=frozen,
            withdrawn=withdrawn,
        )

    def restore(self, state: SafetyState, now: float) -> list[str]:
        """Restore the robots' stops and faults after a restart. Return one log line for each."""
        lines = []
        for name, held in state.sources.items():
            lifecycle = self.watch(name, now).lifecycle
            if held.cause is Cause.STOP:
                lifecycle.stop(held.reason, now)
            elif held.cause is Cause.FAULT:
                lifecycle.fault(held.reason, now)
            else:
                lifecycle.command("deactivate", now, "it was not active before the restart")
            lines.append(f"no policy moves {name!r} until activate: {lifecycle.reason}")
        if state.stopped:
            self.stopped.update(state.stopped)
            lines.append(f"individually stopped, until reset names them: {', '.join(state.stopped)}")
        return lines


def _kept(lifecycle: Lifecycle, longest: int | None = None) -> Held | None:
    """Why a lifecycle is not active, in a form that survives a restart. Cuts the reason to ``longest`` characters."""
    held = lifecycle.held
    if held is None or held.cause is Cause.INACTIVE:
        return held and Held(Cause.INACTIVE)
    return Held(held.cause, held.reason[:longest])
