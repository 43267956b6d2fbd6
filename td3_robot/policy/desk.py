"""Where operators' Commands arrive at the policy server, and from where robots hear of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from td3_robot.core_types import ROBOT_ROLES, Output, Peer
from td3_robot.messages import Command, LifecycleChange, Reply
from td3_robot.safety.commands import TO_ALL, Verbs, carry_out
from td3_robot.safety.lifecycle import Lifecycle

log = logging.getLogger(__name__)

_RELAYS = 1024  # Commands under way to robots, one to each, say; the oldest is forgotten for a further one
_STOPS = 1024  # names of robots that are stopped one by one
_STOP = Command(0, "", "estop", "one is in force at the policy server", 0, "", b"")


class Desk:
    """Takes Commands: for the server itself, for one robot, for all.

    An emergency stop of one robot is latched under its name, whether it is there or not and whether the server watches
    over it or not: it is told of it whenever it comes, until a reset names it or reaches it.

    Args:
        lifecycle, verbs: of the server.
        watch: does a Command's part that is the server's watch over the robot it names; why not, or empty.
        detail: what a Reply of the server says beyond its state.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        verbs: Verbs,
        watch: Callable[[str, Command, float], str],
        detail: Callable[[], dict[str, Any]],
    ) -> None:
        self.lifecycle = lifecycle
        self.robots: dict[str, Peer] = {}
        self._operators: set[Peer] = set()
        self._verbs = verbs
        self._watch = watch
        self._of_server = detail
        self._stopped: set[str] = set()
        self._relayed: dict[int, tuple[str, Peer, int]] = {}  # to whom, of whom, by what number
        self._relays = 0

    def join(self, peer: Peer, stopped: bool) -> list[Output]:
        """A client is there; a robot that comes while it is to be ``stopped`` is told of it."""
        if peer.role == "operator":
            self._operators.add(peer)
        elif peer.role in ROBOT_ROLES:
            self.robots[peer.name] = peer
            if stopped or self.lifecycle.stopped or peer.name in self._stopped:
                return [(peer, _STOP)]
        return []

    @property
    def all_stopped(self) -> tuple[str, ...]:
        """The robots that are stopped one by one."""
        return tuple(sorted(self._stopped))

    def stop(self, names: Iterable[str]) -> None:
        """These robots were stopped before a restart."""
        self._stopped.update(names)

    def stopped(self, name: str) -> bool:
        """Whether an emergency stop of this one robot is in force."""
        return name in self._stopped

    def leave(self, peer: Peer) -> None:
        self._operators.discard(peer)
        if self.robots.get(peer.name) is peer:
            del self.robots[peer.name]

    def command(self, peer: Peer, command: Command, now: float) -> list[Output]:
        """Carry out, relay or refuse. A robot may send nothing but an emergency stop, and gets no Reply: what it hears
        of its stop is the Command that all robots get."""
        if peer.role in ROBOT_ROLES:
            if command.verb == "estop" and not command.target:
                return self._to_all(peer, command, now)[0]
            log.warning(
                "%s: %r from %s is not carried out: a robot may only send estop, for all",
                self.lifecycle.node,
                command.verb[:40],
                peer.name,
            )
            return []
        if command.target not in ("", self.lifecycle.node):
            return self._to_one(peer, command, now)
        outputs, reply = self._to_all(peer, command, now)
        return [*outputs, (peer, reply)]

    def _to_all(self, peer: Peer, command: Command, now: float) -> tuple[list[Output], Reply]:
        """Carry out a Command for the server itself, and pass on what holds for all robots."""
        outputs: list[Output] = []
        reply = carry_out(command, f"{peer.role} {peer.name}", self._verbs, self.lifecycle, self._detail, now)
        if command.verb in TO_ALL and not command.target and not reply.error:
            errors = []
            for name, robot in self.robots.items():
                if error := self._latch(name, command, latch=False) or self._watch(name, command, now):
                    errors.append(error)
                else:
                    outputs.append((robot, replace(command, id=0)))
            reply = replace(reply, detail=self._detail(), error="; ".join(errors)[:2048])
        return outputs, reply

    def reply(self, robot: Peer, reply: Reply) -> list[Output]:
        """A robot's Reply goes to the operator who asked."""
        asked, operator, number = self._relayed.get(reply.id, ("", None, 0))
        if operator is None or asked != robot.name:
            if reply.error:
                log.info("%s refuses: %r", robot.name, reply.error)
            return []
        del self._relayed[reply.id]
        return [(operator, replace(reply, id=number, node=robot.name))] if operator in self._operators else []

    def announce(self, changes: list[LifecycleChange]) -> list[Output]:
        """Tell every connected operator of every change of state."""
        return [(operator, change) for change in changes for operator in self._operators]

    def _to_one(self, peer: Peer, command: Command, now: float) -> list[Output]:
        robot = self.robots.get(command.target)
        stopped = command.target in self._stopped
        error = self._latch(command.target, command, latch=True)
        if robot is None:
            return [(peer, self._to_nobody(command, error, stopped, now))]
        if error := error or self._watch(command.target, command, now):
            return [(peer, self._refusal(command, error))]
        self._relays += 1
        self._relayed[self._relays] = robot.name, peer, command.id
        if len(self._relayed) > _RELAYS:
            del self._relayed[next(iter(self._relayed))]
        return [(robot, replace(command, id=self._relays, target=""))]

    def _detail(self) -> dict[str, Any]:
        return {**self._of_server(), "stopped": list(self.all_stopped)}

    def _latch(self, name: str, command: Command, *, latch: bool) -> str:
        """What a Command means to the stop of one robot; why it may not be carried out, or empty."""
        if command.verb == "reset":
            self._stopped.discard(name)
        elif command.verb == "estop" and latch:
            if len(self._stopped) >= _STOPS and name not in self._stopped:
                return f"{_STOPS} robots are stopped one by one already; stop all with estop, without a target"
            self._stopped.add(name)
            log.warning("%s: emergency stop of %r: %r", self.lifecycle.node, name[:64], command.reason[:200])
        elif command.verb in ("configure", "activate", "deactivate") and name in self._stopped:
            return f"{self.lifecycle.node}/{name[:64]}: an emergency stop is in force; reset it first"
        return ""

    def _to_nobody(self, command: Command, error: str, stopped: bool, now: float) -> Reply:
        """The Reply to a Command for a robot that is not there; an error even where a stop is latched: a typing
        mistake must not look like a robot that stands still."""
        known = ", ".join(sorted(self.robots)[:20]) or "none"
        absent = f"no robot {command.target[:64]!r} is connected; connected: {known}"
        if error:
            return self._refusal(command, error)
        if command.verb in ("estop", "deactivate") or (command.verb == "reset" and stopped):
            if error := self._watch(command.target, command, now):
                return self._refusal(command, error)
            if command.verb == "reset":
                return Reply(command.id, self.lifecycle.node, "", self.lifecycle.state, self._detail())
            if command.verb == "estop":
                absent += "; the stop is latched: one of that name is told of it when it comes"
        return self._refusal(command, absent)

    def _refusal(self, command: Command, error: str) -> Reply:
        return Reply(command.id, self.lifecycle.node, f"{self.lifecycle.node}: {error}", self.lifecycle.state, {})
