"""A place for what a core records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from td3_robot.core_types import Input, Origin
from td3_robot.messages import Message
from td3_robot.topics import RECORDER
from td3_robot.transport import turns


class Records:
    """A sink that keeps the messages that it receives."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        self.messages.append(turns.turn(now, inputs))

    def send(self, to: Origin, message: Message) -> bool:
        assert to == RECORDER
        self.messages.append(message)
        return True

    def take(self, *kinds: type[Message]) -> list[Any]:
        taken, self.messages = self.messages, []
        return [message for message in taken if isinstance(message, kinds)]
