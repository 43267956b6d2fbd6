"""The interface of a core: its inputs, its outputs, and the peers that send and receive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from td3_robot.messages import Bye, Hello, Message

ROBOT_ROLES = ("simulator", "driver")
"""The roles of sources, which publish Steps."""
MAX_ROBOTS = 1024
"""The maximum number of robots of one source."""


@dataclass(frozen=True, eq=False)
class Peer:
    """What a server knows about a client during one connection.

    Attributes:
        link: name of the link on which the client connected.
        key: routing identity of the connection.
        dims: the sizes of the arrays in the client's messages, by letter: N robots, O observation channels, A action
            channels.
        owner: the client's public key, proved in its handshake; empty on a link without keys.
    """

    link: str
    key: bytes
    hello: Hello
    dims: Mapping[str, int]
    owner: str = ""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def role(self) -> str:
        return self.hello.role


class Farewell(Enum):
    """Why a client left: only the reasons that change a decision. The values are the ``reason`` texts in a Bye."""

    STOPPED = "stopped"  # its process ends normally
    RECONNECTED = "connected anew"  # the same process is back on a new connection
    OTHER = ""  # any other reason

    @classmethod
    def of(cls, bye: Bye) -> Farewell:
        """The meaning of a Bye. No other code makes a decision from the text of a Bye."""
        return next((farewell for farewell in cls if farewell.value == bye.reason), cls.OTHER)


Origin = Peer | str
"""The sender of an input or the receiver of an output: a client as a Peer, or a server as the name of its link."""
Input = tuple[Origin, Message]
Output = tuple[Origin, Message]


class Core(Protocol):
    """The pure part of a node: no sockets, files or clocks."""

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Process the inputs at time ``now`` (s); return the messages to send."""
