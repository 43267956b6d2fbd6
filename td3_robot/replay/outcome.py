"""The result of replaying a core: recorded and replayed messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from td3_robot.messages import Message
from td3_robot.recording.entries import Attachment, Entry


@dataclass(frozen=True)
class Replayed:
    """The recorded and the replayed messages of one topic and stream.

    Attributes:
        topic: its name.
        packages: numbers must be equal to the bit only if these packages have the same versions.
        expected: the expected messages with their entries. The entry is None if the message is from an attachment.
        got: the replayed messages.
        reference: an attachment with ``got``; only for topics that are not in MESSAGES.
        stream: the publisher; part of the reference's name.
        where: the Step at which a message was sent, as text, by ``id`` of the message.
        older: True if the recorded node did not offer this topic. Then only a reference can be compared.
        made: metadata of the machine that made the reference. None if there is no reference, or it lacks this.
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
        turns: number of replayed turns.
        notes: what could not be checked, and why.
    """

    parts: list[Replayed] = field(default_factory=list)
    turns: int = 0
    notes: list[str] = field(default_factory=list)
