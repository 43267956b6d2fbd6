"""Decodes recorded messages. The decoder learns the sizes of arrays from the recording."""

from __future__ import annotations

import logging
from collections import Counter

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import ProtocolError, SessionError
from td3_robot.messages import MESSAGES, Hello, Message, Step, wire_fields
from td3_robot.recording.entries import Entry
from td3_robot.transport import codec

log = logging.getLogger(__name__)


def _dimensions(message: type[Message]) -> int:
    """The number of dimensions of the first array; 0 without an array."""
    return next((len(wire.shape) for wire in wire_fields(message).values() if wire.kind == "array"), 0)


_NEED_SIZES = frozenset(name for name, message in MESSAGES.items() if _dimensions(message) > 1)


class Decoder:
    """Decodes entries of one recording.

    Args:
        label: name of the recording, for error texts.

    Attributes:
        sizes: N, O and A of each known source.
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
            sizes = self.sizes.get(codec.source_of(entry.payload)) if entry.topic in _NEED_SIZES else None
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
        """Whether the sizes for this message are known. Also true for malformed bytes: decoding reports the error."""
        if entry.topic not in _NEED_SIZES:
            return True
        source = codec.source_of(entry.payload)
        return not source or source in self.sizes

    def learn(self, entry: Entry) -> None:
        """Learn the sizes of a source from its Hello or a Step. Known sizes do not change."""
        if entry.publisher in self.sizes or entry.topic not in (Hello.NAME, Step.NAME):
            return
        message = self(entry)
        if isinstance(message, Hello) and message.role in ROBOT_ROLES:
            channels = [message.spec.get(kind) for kind in ("observations", "actions")]
            o, a = (len(channel) if isinstance(channel, list) else 0 for channel in channels)
            if o and a:
                self.sizes[entry.publisher] = {"N": message.robots, "O": o, "A": a}
        elif isinstance(message, Step):
            (n, o), a = message.observation.shape, message.action.shape[1]
            self.sizes[entry.publisher] = {"N": n, "O": o, "A": a}
