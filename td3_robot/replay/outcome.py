"""What driving a core from a recording gives: what it said then, and what it says now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from td3_robot.messages import Message
from td3_robot.recording.entries import Attachment, Entry


@dataclass(frozen=True)
class Replayed:
    """What a core was recorded to say, and what it says now, of one topic.

    Attributes:
        topic: their name.
        packages: which packages, besides the processor, decide whether numbers must be the same to the bit.
        expected: recorded messages, with their entries (None for what is kept in an attachment).
        got: today's.
        reference: the attachment that would hold ``got``, for what is not a message of the recording.
        made: what the reference that is expected says of the machine it was made on, as a session's metadata does; None
            for what was recorded, or a reference that does not say it.
        stream: whose messages they are, for the name of such an attachment.
        where: the Step at which a message (by ``id``) was said, in words.
        older: recorded of a node that did not offer this topic yet; there is nothing to compare with but a reference.
    """

    topic: str
    packages: tuple[str, ...]
    expected: Sequence[tuple[Entry | None, Message]]
    got: Sequence[Message]
    reference: Attachment | None = None
    stream: str = "all"
    where: Mapping[int, str] = field(default_factory=dict)
    older: bool = False
    made: Mapping[str, str] | None = None


@dataclass
class Outcome:
    """What replaying one core gave; ``notes`` say what could not be checked, and why.

    Attributes:
        turns: how often cores were told what their nodes were told.
    """

    parts: list[Replayed] = field(default_factory=list)
    turns: int = 0
    notes: list[str] = field(default_factory=list)
