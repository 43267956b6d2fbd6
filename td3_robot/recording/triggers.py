"""The events that make a recorder with a ring buffer write the ring to a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from td3_robot.core_types import Farewell
from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, Bye, LifecycleChange, Message, Status
from td3_robot.recording.entries import Entry
from td3_robot.safety.lifecycle import State
from td3_robot.transport import codec


def _failed(message: Message) -> str | None:
    if isinstance(message, Status) and message.state == "failed":
        return f"{message.node} failed: {message.detail}"
    return None


def _fault(message: Message) -> str | None:
    if isinstance(message, LifecycleChange) and message.state == State.FAULT:
        return f"{message.node} is in fault: {message.reason}"
    return None


TRIGGERS: dict[str, Callable[[Any], str | None]] = {Status.NAME: _failed, LifecycleChange.NAME: _fault}
"""For each topic, a function that describes the event in a message. It returns None if there is no event.

The recorder decodes messages of these topics only.
"""


def reason(entry: Entry) -> str | None:
    """The event in a message, in words; None if the message contains no event."""
    look = TRIGGERS.get(entry.topic)
    if look is None:
        return None
    try:
        return look(codec.decode(MESSAGES[entry.topic].NAME, entry.payload))
    except ProtocolError:
        return None


def lost(name: str, bye: Bye) -> str | None:
    """The event of a lost client, in words; None if the client left in order.

    Args:
        name: name of the client.
        bye: the Bye of the client. If the client sent none, the link makes one.
    """
    return f"{name}: {bye.reason}" if Farewell.of(bye) is Farewell.OTHER else None
