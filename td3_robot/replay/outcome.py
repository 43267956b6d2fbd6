"""The result of replaying a core: its recorded messages and today's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from td3_robot.messages import Message
from td3_robot.recording.entries import Attachment, Entry


@dataclass(frozen=True)
class Replayed:
    """The messages of one topic, recorded and today's.

    Attributes:
        topic: its name.
        packages: the packages that, besides the processor, decide whether numbers must be equal to the bit.
        expected: the expected messages, with their entries; None for those of an attachment.
        got: today's messages.
        reference: the attachment with ``got``, if the topic is not one of messages.
        stream: the publisher, for the name of the reference.
        where: the Step at which a message (by ``id``) was sent, in words.
        older: the node did not offer this topic; only a reference can be compared.
        made: the machine that made the reference, like a session's metadata; None for recorded messages, and for a
            reference that does not record it.
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
    """The result of replaying one core.

    Attributes:
        parts: one for each stream.
        turns: number of turns that cores were told.
        notes: what could not be checked, and why.
    """

    parts: list[Replayed] = field(default_factory=list)
    turns: int = 0
    notes: list[str] = field(default_factory=list)
