"""Events that make a recorder with a ring buffer write its last seconds to a file."""

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
"""For each topic, a function that describes the event in a message; None if there is none.

The recorder decodes no other topic while it records.
"""


def reason(entry: Entry) -> str | None:
    """The event in a recorded message that makes the recorder write; None if there is none."""
    look = TRIGGERS.get(entry.topic)
    if look is None:
        return None
    try:
        return look(codec.decode(MESSAGES[entry.topic].NAME, entry.payload))
    except ProtocolError:
        return None


def lost(name: str, bye: Bye) -> str | None:
    """The event that a client has left the recorder; None if the client left in order.

    Args:
        name: of the client.
        bye: its last message, or the one that the session made for it.
    """
    return f"{name}: {bye.reason}" if Farewell.of(bye) is Farewell.OTHER else None
