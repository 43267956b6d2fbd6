"""The desk of a policy server: it receives operators' Commands, and relays them to robots."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from td3_robot.core_types import ROBOT_ROLES, Output, Peer
from td3_robot.messages import Command, LifecycleChange, Reply
from td3_robot.policy.safety import Safety
from td3_robot.safety.commands import Verbs, carry_out

log = logging.getLogger(__name__)

_TO_ALL = ("configure", "activate", "deactivate", "reset", "estop")
"""Verbs that the server passes on to all its robots when the Command has no target."""
_RELAYS = 1024  # relayed Commands without a Reply; beyond this number the desk forgets the oldest
_STOP = Command(0, "", "estop", "one is in force at the policy server", 0, "", b"")


class Desk:
    """Takes Commands for the server itself, for one robot, and for all robots."""

    def __init__(self, safety: Safety, verbs: Verbs, detail: Callable[[], dict[str, Any]]) -> None:
        self.robots: dict[str, Peer] = {}
        self._safety = safety
        self._lifecycle = safety.lifecycle
        self._operators: set[Peer] = set()
        self._verbs = verbs
        self._detail = detail
        # Key: id of the relayed Command. Value: robot, operator, and id of the operator's Command.
        self._relayed: dict[int, tuple[str, Peer, int]] = {}
        self._relays = 0

    def join(self, peer: Peer) -> list[Output]:
        """Add a client that has connected. If an emergency stop is in force for a robot, send this robot the stop."""
        if peer.role == "operator":
            self._operators.add(peer)
        elif peer.role in ROBOT_ROLES:
            self.robots[peer.name] = peer
            if self._safety.stops(peer.name):
                return [(peer, _STOP)]
        return []

    def leave(self, peer: Peer) -> None:
        """Remove a client that has left."""
        self._operators.discard(peer)
        if self.robots.get(peer.name) is peer:
            del self.robots[peer.name]

    def command(self, peer: Peer, command: Command, now: float) -> list[Output]:
        """Carry out, relay or refuse a Command.

        From a robot, the desk accepts only an emergency stop for all robots. It relays this stop to all robots, the
        sender included, and sends no Reply.
        """
        if peer.role in ROBOT_ROLES:
            if command.verb == "estop" and not command.target:
                return self._to_all(peer, command, now)[0]
            refusal = "%s: %r from %s is not carried out: a robot can send no command except estop for all robots"
            log.warning(refusal, self._lifecycle.node, command.verb[:40], peer.name)
            return []
        if command.target not in ("", self._lifecycle.node):
            return self._to_one(peer, command, now)
        outputs, reply = self._to_all(peer, command, now)
        return [*outputs, (peer, reply)]

    def _to_all(self, peer: Peer, command: Command, now: float) -> tuple[list[Output], Reply]:
        """Carry out a Command for the server itself.

        A Command with a verb in _TO_ALL and without a target also goes to the robots.
        """
        outputs: list[Output] = []
        reply = carry_out(command, f"{peer.role} {peer.name}", self._verbs, self._lifecycle, self._detail, now)
        if command.verb in _TO_ALL and not command.target and not reply.error:
            errors = []
            for name, robot in self.robots.items():
                if error := self._safety.command(name, command, now):
                    errors.append(error)
                else:
                    outputs.append((robot, replace(command, id=0)))
            reply = replace(reply, detail=self._detail(), error="; ".join(errors)[:2048])
        return outputs, reply

    def reply(self, robot: Peer, reply: Reply) -> list[Output]:
        """Send a robot's Reply to the operator who asked."""
        asked, operator, number = self._relayed.get(reply.id, ("", None, 0))
        if operator is None or asked != robot.name:
            if reply.error:
                log.info("%s refuses: %r", robot.name, reply.error)
            return []
        del self._relayed[reply.id]
        return [(operator, replace(reply, id=number, node=robot.name))] if operator in self._operators else []

    def announce(self, changes: list[LifecycleChange]) -> list[Output]:
        """Send every change of state to every connected operator."""
        return [(operator, change) for change in changes for operator in self._operators]

    def _to_one(self, peer: Peer, command: Command, now: float) -> list[Output]:
        robot = self.robots.get(command.target)
        if robot is None:
            return [(peer, self._to_absent(command, now))]
        if error := self._safety.command(command.target, command, now):
            return [(peer, self._refusal(command, error))]
        self._relays += 1
        self._relayed[self._relays] = robot.name, peer, command.id
        if len(self._relayed) > _RELAYS:
            del self._relayed[next(iter(self._relayed))]
        return [(robot, replace(command, id=self._relays, target=""))]

    def _to_absent(self, command: Command, now: float) -> Reply:
        """The Reply to a Command for a robot that is not connected.

        For a ``reset`` that ends a stop, the Reply is not an error. For any other Command, the Reply is an error. This
        includes ``estop``, although the server keeps the stop: a mistyped name must not look like a stopped robot.
        """
        ends_stop = command.verb == "reset" and command.target in self._safety.stopped
        watched = ends_stop or command.verb in ("estop", "deactivate")
        if error := self._safety.command(command.target, command, now, watched=watched):
            return self._refusal(command, error)
        if ends_stop:
            return Reply(command.id, self._lifecycle.node, "", self._lifecycle.state.value, self._detail())
        known = ", ".join(sorted(self.robots)[:20]) or "none"
        absent = f"no robot {command.target[:64]!r} is connected; connected: {known}"
        if command.verb == "estop":
            # Recorded sessions contain this text and the errors of PolicyStore.roll_back. Replay compares them exactly.
            absent += "; the stop is latched: one of that name is told of it when it comes"
        return self._refusal(command, absent)

    def _refusal(self, command: Command, error: str) -> Reply:
        node = self._lifecycle.node
        return Reply(command.id, node, f"{node}: {error}", self._lifecycle.state.value, {})
