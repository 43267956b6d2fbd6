"""Decodes recorded messages. The decoder learns the sizes of arrays from the recording."""

from __future__ import annotations

import logging
from collections import Counter

from td3_robot.errors import ProtocolError, SessionError
from td3_robot.messages import Action, Hello, Message, Step
from td3_robot.recording.entries import Entry
from td3_robot.recording.values import robot_of
from td3_robot.transport import codec

log = logging.getLogger(__name__)


class Decoder:
    """Decodes entries of one recording.

    Args:
        label: name of the recording, for error texts.

    Attributes:
        sizes: for each source: number of robots (N), size of an observation (O), and size of an action (A).
        unknown_fields: by topic, the number of messages with unknown fields. The decoder ignores these fields.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.sizes: dict[str, dict[str, int]] = {}
        self.unknown_fields: Counter[str] = Counter()

    def __call__(self, entry: Entry) -> Message:
        """Decode a message.

        Raises:
            SessionError: the entry is not a message of this protocol.
        """
        try:
            sizes = self.sizes.get(codec.source_of(entry.payload)) if entry.topic == Action.NAME else None
            message = codec.decode(entry.topic, entry.payload, sizes)
        except ProtocolError as error:
            raise SessionError(f"{self.label}: {entry.publisher}/{entry.topic} {entry.sequence}: {error}") from None
        if extra := codec.extra_fields(type(message), entry.payload):
            if not self.unknown_fields[entry.topic]:
                text = "%s: %s messages have %d fields unknown to this version; it ignores them"
                log.warning(text, self.label, entry.topic, extra)
            self.unknown_fields[entry.topic] += 1
        return message

    def knows(self, entry: Entry) -> bool:
        """Whether the decoder has the sizes that it needs for this message.

        For malformed bytes, the result is also True: the caller then decodes them, and decoding reports the error.
        """
        if entry.topic != Action.NAME:
            return True
        source = codec.source_of(entry.payload)
        return not source or source in self.sizes

    def learn(self, entry: Entry) -> None:
        """Learn the sizes of a source from its Hello or a Step. Known sizes do not change."""
        if entry.publisher in self.sizes or entry.topic not in (Hello.NAME, Step.NAME):
            return
        message = self(entry)
        if isinstance(message, Hello) and (spec := robot_of(message)):
            self.sizes[entry.publisher] = {"N": message.robots, "O": spec.observation_size, "A": spec.action_size}
        elif isinstance(message, Step):
            (n, o), a = message.observation.shape, message.action.shape[1]
            self.sizes[entry.publisher] = {"N": n, "O": o, "A": a}
