"""What makes a recorder that keeps the last seconds write them down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, Bye, LifecycleChange, Message, Status
from td3_robot.recording.entries import Entry
from td3_robot.safety.lifecycle import FAULT
from td3_robot.transport import codec


def _failed(message: Message) -> str | None:
    if isinstance(message, Status) and message.state == "failed":
        return f"{message.node} failed: {message.detail}"
    return None


def _fault(message: Message) -> str | None:
    if isinstance(message, LifecycleChange) and message.state == FAULT:
        return f"{message.node} is in fault: {message.reason}"
    return None


TRIGGERS: dict[str, Callable[[Any], str | None]] = {Status.NAME: _failed, LifecycleChange.NAME: _fault}
"""Topic: what a message of it says has happened, None for nothing. Only these topics are decoded while recording."""


def reason(entry: Entry) -> str | None:
    """Why this message is one to write the last seconds down for; None if it is not."""
    look = TRIGGERS.get(entry.topic)
    if look is None:
        return None
    try:
        return look(codec.decode(MESSAGES[entry.topic].NAME, entry.payload))
    except ProtocolError:
        return None


_IN_ORDER = ("stopped", "connected anew")
"""Why a node that is well takes its leave."""


def lost(name: str, bye: Bye) -> str | None:
    """What has happened to a node that the recorder hears no more from; None if it ended as it should."""
    return None if bye.reason in _IN_ORDER else f"{name}: {bye.reason}"
