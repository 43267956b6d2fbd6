"""From the bytes of a recording to messages: knows the sizes that a handshake would have told a peer."""

from __future__ import annotations

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import ProtocolError, SessionError
from td3_robot.messages import MESSAGES, Hello, Message, Step, wire_fields
from td3_robot.recording.entries import Entry
from td3_robot.transport import codec


def _ambiguous(message: type[Message]) -> bool:
    """Whether the arrays do not say their sizes by themselves: the first has two, as the one of an Action."""
    shapes = [wire.shape for wire in wire_fields(message).values() if wire.kind == "array"]
    return bool(shapes) and len(shapes[0]) > 1


_OF_A_SOURCE = frozenset(name for name, message in MESSAGES.items() if _ambiguous(message))
"""Topics that can be read only by who knows the sizes of their source."""


class Decoder:
    """Decodes entries of one recording.

    Args:
        label: names the recording in errors.

    Attributes:
        sizes: N, O and A of each source, as far as they were learnt.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.sizes: dict[str, dict[str, int]] = {}

    def __call__(self, entry: Entry) -> Message:
        """The message of an entry.

        Raises:
            SessionError: it is not one of this protocol.
        """
        try:
            sizes = None
            if entry.topic in _OF_A_SOURCE:  # the publisher is the source, or has to be told which it is
                sizes = self.sizes.get(entry.publisher) or self.sizes.get(codec.source_of(entry.payload))
            return codec.decode(entry.topic, entry.payload, sizes)
        except ProtocolError as error:
            raise SessionError(f"{self.label}: {entry.publisher}/{entry.topic} {entry.sequence}: {error}") from None

    def knows(self, entry: Entry) -> bool:
        """Whether the sizes were learnt that it takes to read this message."""
        try:
            return entry.topic not in _OF_A_SOURCE or codec.source_of(entry.payload) in self.sizes
        except ProtocolError:
            return True  # to read it says what is wrong with it

    def forget(self, source: str) -> None:
        """Learn the sizes of a source anew: another process may have its name."""
        self.sizes.pop(source, None)

    def learn(self, entry: Entry) -> None:
        """Look for the sizes of a source: in its Hello, or in a Step of its. What was learnt first stays.

        Raises:
            SessionError: it is not a message of this protocol.
        """
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
