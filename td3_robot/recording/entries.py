"""A recorded message, and the metadata and attachments of a recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from td3_robot.core_types import Peer
from td3_robot.messages import Hello, Record, Start, Weights

METADATA = "td3_robot"  # name of the MCAP metadata record of every recording
REASON = "written_because"  # key in the metadata: why the recorder wrote its ring buffer
CONFIG = "config.yaml"  # name of the attachment with the resolved configuration
METRICS = "metrics.jsonl"  # name of the attachment with the learning metrics of a finished run
REPEATED = {Hello.NAME: 1, Start.NAME: 1, Weights.NAME: 2}
"""For each topic: how many of the newest earlier messages a new file of a recording repeats. The number holds for each
publisher and link. With the repeated messages, a reader needs no other file."""
ON_THE_WAY_NS = 500_000_000
"""Maximum delay of a message to the recorder, in ns. Nodes send messages in groups, so the first message of a group
waits for the last."""


def jumped(published: int, received: int) -> bool:
    """Whether two measurements of the same time, in ns, differ too much.

    The reason is a clock that somebody set, or a program that stood still.

    Args:
        published: the time on the publisher's clock.
        received: the time on the receiver's clock.
    """
    return abs(published - received) > ON_THE_WAY_NS


@dataclass(frozen=True)
class Entry:
    """A recorded message with its publisher and times.

    Attributes:
        publisher, incarnation: the node that sent a copy of the message to the recorder. Usually this node is also
            the sender of the message. An operator sends no copies, so the receiver of an operator's message sends the
            copy.
        topic: name of the message.
        link: the link on which the node sent the message; ``recorder`` if the node sent the message only to
            recorders and monitors.
        sequence: counts 0, 1, 2, … for each topic of a publisher; a jump shows missing messages.
        published: time on the publisher's clock, in ns since 1970.
        received: time on the recorder's clock, in ns since 1970; never decreases within a recording.
        payload: the bytes of the message on the wire.
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
        about = peer.name, peer.hello.incarnation, record.topic, record.link
        return cls(*about, record.sequence, record.stamp, received, record.payload)

    @property
    def node(self) -> tuple[str, int]:
        return self.publisher, self.incarnation

    @property
    def channel(self) -> tuple[str, int, str, str]:
        return self.publisher, self.incarnation, self.topic, self.link

    @property
    def stream(self) -> tuple[str, int, str]:
        """The stream of the message. Each stream has its own ``sequence``."""
        return self.publisher, self.incarnation, self.topic

    @property
    def identity(self) -> tuple[str, int, str, int]:
        """Equal for two copies of a message."""
        return (*self.stream, self.sequence)


@dataclass(frozen=True)
class Attachment:
    """A file inside a recording."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True)
class Facts:
    """Everything in a recording except its messages.

    Attributes:
        metadata: protocol, version, host, … by name.
        attachments: the configuration and other files.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    attachments: Sequence[Attachment] = ()
