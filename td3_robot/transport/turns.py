"""What a core was told in one turn, in a form that is short: what is recorded elsewhere is named, not repeated."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from td3_robot.core_types import Input, Origin, Peer
from td3_robot.messages import (
    MESSAGES,
    Action,
    Command,
    Evaluation,
    Message,
    SimulatorState,
    Step,
    Turn,
    Weights,
    wire_fields,
)
from td3_robot.transport import codec

_OF_A_PEER = "#"

_NAMED: dict[type[Message], Callable[[Any], list[Any]]] = {
    # With their stamps: a lock-step run that went back says the same numbers once more.
    Step: lambda it: [it.source, it.incarnation, it.sequence, it.stamp],
    Action: lambda it: [it.source, it.incarnation, it.answers, it.stamp, it.weights_version],
    Weights: lambda it: [it.version, it.sha256],
    SimulatorState: lambda it: [it.source, it.incarnation, it.answers, len(it.payload)],
    Evaluation: lambda it: [it.version, it.env_steps, it.updates],
    Command: lambda it: [it.id, it.target, it.verb, it.reason, it.version, it.sha256],
}
"""Messages with arrays or policies in them: what tells one from all others of its topic."""
NAMED = tuple(kind.NAME for kind in _NAMED)
"""The topics whose messages are named by Turns."""
_FIELDS = {kind: tuple(wire_fields(kind)) for kind in MESSAGES.values() if kind not in _NAMED}

Name = tuple[Any, ...]


def turn(now: float, inputs: Sequence[Input]) -> Turn:
    """What a core is told at this time (s)."""
    return Turn(now, [[_origin(origin), message.NAME, _described(message)] for origin, message in inputs])


def name_of(message: Message) -> Name | None:
    """By what a Turn names this message; None for one that it repeats."""
    named = _NAMED.get(type(message))
    return (message.NAME, *named(message)) if named else None


def named_in(topic: str, fields: dict[str, Any]) -> Name | None:
    """The name that an input of a Turn stands for; None where its fields are the message."""
    names = fields.get("named")
    return (topic, *names) if isinstance(names, list) else None


def repeated_in(topic: str, fields: dict[str, Any]) -> Message | None:
    """A message that is named and repeated as well, since who said it may not have lived to have it recorded.

    Raises:
        ProtocolError: its bytes are no message of this topic.
        ValueError: they are no base64.
        KeyError: of how many robots it is is not said.
    """
    if "wire" not in fields:
        return None
    return codec.decode(topic, base64.b64decode(fields["wire"], validate=True), {"N": fields["robots"]})


def is_peer(origin: str) -> bool:
    """Whether the origin of a Turn's input is a client, and not the server at the end of a link."""
    return origin.startswith(_OF_A_PEER)


def only_here(inputs: Sequence[Input]) -> Iterator[Message]:
    """What has to be recorded by who takes it: the Commands of operators, who are not recorded themselves."""
    for origin, message in inputs:
        if isinstance(message, Command) and isinstance(origin, Peer) and origin.role == "operator":
            yield message


def _origin(origin: Origin) -> str:
    return f"{_OF_A_PEER}{origin.key.hex()}" if isinstance(origin, Peer) else origin


def _described(message: Message) -> dict[str, Any]:
    named = _NAMED.get(type(message))
    if named is None:
        return {name: getattr(message, name) for name in _FIELDS[type(message)]}
    if isinstance(message, Step | Action):
        wire = base64.b64encode(codec.encode(message)).decode()
        return {"named": named(message), "robots": len(message.action), "wire": wire}
    return {"named": named(message)}
