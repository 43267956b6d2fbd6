"""A recorded message, and the facts that a recording has beside its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from td3_robot.core_types import Peer
from td3_robot.messages import Hello, Record, Start, Weights

METADATA = "td3_robot"
"""Name of the MCAP metadata record of every recording."""
REASON = "written_because"
"""Key in that record: why a ring was written."""
CONFIG = "config.yaml"
"""Name of the attachment with the resolved configuration."""
METRICS = "metrics.jsonl"
"""Name of the attachment with the learning metrics of a finished run."""
REPEATED = {Hello.NAME: 1, Start.NAME: 1, Weights.NAME: 2}
"""How many of the newest messages, per publisher and link, each new file repeats so that it can be read alone."""
ON_THE_WAY_NS = 500_000_000
"""More than the longest delay of a message to the recorder, as nodes and recorder gather messages."""


@dataclass(frozen=True)
class Entry:
    """A recorded message with its publisher and times.

    Attributes:
        publisher, incarnation: the node that sent it.
        topic, link: name of the message, and the link it was sent on.
        sequence: 0, 1, 2, … for each topic of a publisher; a jump shows messages that were not recorded.
        published: wall clock of the publisher, in ns since 1970.
        received: clock of the recorder, in ns since 1970; never decreases within a recording.
        payload: the wire bytes.
    """

    publisher: str
    incarnation: int
    topic: str
    link: str
    sequence: int
    published: int
    received: int
    payload: bytes

    @classmethod
    def offered(cls, peer: Peer, record: Record, received: int) -> Entry:
        """The entry of a Record that arrives at ``received`` (ns since 1970)."""
        return cls(
            peer.name,
            peer.hello.incarnation,
            record.topic,
            record.link,
            record.sequence,
            record.stamp,
            received,
            record.payload,
        )

    @property
    def channel(self) -> tuple[str, int, str, str]:
        return self.publisher, self.incarnation, self.topic, self.link

    @property
    def stream(self) -> tuple[str, int, str]:
        """The stream whose messages ``sequence`` numbers."""
        return self.publisher, self.incarnation, self.topic

    @property
    def identity(self) -> tuple[str, int, str, int]:
        """Equal for two copies of one message."""
        return (*self.stream, self.sequence)


@dataclass(frozen=True)
class Attachment:
    """A file within the file."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True)
class Facts:
    """The content of a recording beside its messages.

    Attributes:
        metadata: of the record METADATA: protocol, version, host, …
        attachments: the configuration, policy bundles, references.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    attachments: Sequence[Attachment] = ()


def printable(text: str) -> str:
    """Text from a file, without control characters that steer a terminal."""
    return "\n".join(line if line.isprintable() else repr(line) for line in text.split("\n"))
