"""Makes and reads Turns, which hold the inputs of a core in a short form.

If a message has arrays or a long payload, the recording holds it separately. So a Turn holds only a name that
identifies this message. A Step or Action is an exception: the Turn also holds the encoded message, because the sender
may die before the recorder gets the message.
"""

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
    Teleop,
    Turn,
    Weights,
    wire_fields,
)
from td3_robot.transport import codec

_CLIENT = "#"

_NAMED: dict[type[Message], Callable[[Any], list[Any]]] = {
    # The name needs the stamp: a lock-step run repeats its sequence numbers after it returns to a checkpoint.
    Step: lambda it: [it.source, it.incarnation, it.sequence, it.stamp],
    # A safe Action can replace an operator's Action for the same Step, and both can have version 0. The word "operated"
    # tells the two Actions apart.
    Action: lambda it: [
        it.source,
        it.incarnation,
        it.answers,
        it.stamp,
        it.weights_version,
        *(["operated"] if it.operated else []),
    ],
    Weights: lambda it: [it.version, it.sha256],
    SimulatorState: lambda it: [it.source, it.incarnation, it.answers, len(it.payload)],
    Evaluation: lambda it: [it.version, it.env_steps, it.updates],
    Command: lambda it: [it.id, it.target, it.verb, it.reason, it.version, it.sha256],
}
"""For each type of input that has arrays or a long payload: a function that returns the parts of the message's name."""
NAMED = tuple(kind.NAME for kind in _NAMED)
"""The topics of messages that a Turn identifies by a name."""
_FIELDS = {kind: tuple(wire_fields(kind)) for kind in MESSAGES.values() if kind not in _NAMED}

Name = tuple[Any, ...]


def turn(now: float, inputs: Sequence[Input]) -> Turn:
    """The Turn of a core at ``now`` (s)."""
    return Turn(now, [[_origin(origin), message.NAME, _described(message)] for origin, message in inputs])


def name_of(message: Message) -> Name | None:
    """The name that identifies this message in a Turn; None if a Turn holds the whole message."""
    named = _NAMED.get(type(message))
    return (message.NAME, *named(message)) if named else None


def named_in(topic: str, fields: dict[str, Any]) -> Name | None:
    """The name in an input of a Turn; None if the input holds the whole message."""
    names = fields.get("named")
    return (topic, *names) if isinstance(names, list) else None


def repeated_in(topic: str, fields: dict[str, Any]) -> Message | None:
    """The message in the field ``wire`` of an input of a Turn; None if the input has no such field.

    A damaged field raises ProtocolError, ValueError or KeyError.
    """
    if "wire" not in fields:
        return None
    return codec.decode(topic, base64.b64decode(fields["wire"], validate=True), {"N": fields["robots"]})


def is_peer(origin: str) -> bool:
    """Whether the origin of an input is a client, not a server."""
    return origin.startswith(_CLIENT)


def only_here(inputs: Sequence[Input]) -> Iterator[Message]:
    """The Commands and Teleops from operators. The receiver must record them, because an operator records nothing."""
    for origin, message in inputs:
        if isinstance(message, Command | Teleop) and isinstance(origin, Peer) and origin.role == "operator":
            yield message


def _origin(origin: Origin) -> str:
    return f"{_CLIENT}{origin.key.hex()}" if isinstance(origin, Peer) else origin


def _described(message: Message) -> dict[str, Any]:
    named = _NAMED.get(type(message))
    if named is None:
        return {name: getattr(message, name) for name in _FIELDS[type(message)]}
    if isinstance(message, Step | Action):
        wire = base64.b64encode(codec.encode(message)).decode()
        return {"named": named(message), "robots": len(message.action), "wire": wire}
    return {"named": named(message)}
