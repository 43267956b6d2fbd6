"""The result of replaying a core: recorded and replayed messages, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from td3_robot.messages import Message
from td3_robot.recording.entries import Attachment, Entry
from td3_robot.replay.compare import Comparison


@dataclass(frozen=True)
class Replayed:
    """The recorded and the replayed messages of one topic and stream.

    Attributes:
        packages: replay compares bit for bit only if the recording machine and this machine have the same versions of
            these packages. With ``--exact``, replay always compares bit for bit.
        expected: the recorded messages with their entries. The entry is None if the message is from an attachment.
        got: the replayed messages.
        reference: the attachment that ``--update`` writes. Only for results that are not sent as messages; else None.
        stream: ``PUBLISHER/INCARNATION``, or ``all``.
        where: maps Python's ``id`` of a message to a text that names the Step at which the node sent the message.
        made: metadata of the machine that made the reference, if known.
    """

    topic: str
    packages: tuple[str, ...]
    expected: Sequence[tuple[Entry | None, Message]]
    got: Sequence[Message]
    reference: Attachment | None = None
    stream: str = "all"
    where: Mapping[int, str] = field(default_factory=dict)
    made: Mapping[str, str] | None = None


@dataclass
class Outcome:
    """The result of replaying one core.

    Attributes:
        parts: recorded and replayed messages, by topic and stream.
        turns: number of replayed turns.
        notes: texts about messages that replay did not compare, with the reasons.
        comparisons: pairs of a comparison and a text. The text says how exactly replay compared the messages: bit for
            bit or within a tolerance. There is one pair for each topic and text.
        recorded_s: time from the first to the last expected message of the longest stream, in seconds.
        taken_s: duration of the replay in seconds.
    """

    parts: list[Replayed] = field(default_factory=list)
    turns: int = 0
    notes: list[str] = field(default_factory=list)
    core: str = ""
    comparisons: list[tuple[Comparison, str]] = field(default_factory=list)
    recorded_s: float = 0.0
    taken_s: float = 0.0

    def add(self, comparison: Comparison, how: str) -> None:
        """Add a comparison. If an earlier comparison has the same topic and ``how``, merge the two."""
        for known, known_how in self.comparisons:
            if (known.topic, known_how) == (comparison.topic, how):
                known.add(comparison)
                return
        self.comparisons.append((comparison, how))

    @property
    def compared(self) -> int:
        return sum(comparison.compared for comparison, _ in self.comparisons)

    @property
    def same(self) -> bool:
        return all(comparison.same for comparison, _ in self.comparisons)
