"""What a core exchanges with its driver: inputs, outputs, and the peers that they come from and go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from td3_robot.messages import Bye, Hello, Message

ROBOT_ROLES = ("simulator", "driver")
"""The roles of sources, which publish Steps."""
MAX_ROBOTS = 1024
"""The most robots of one source."""


@dataclass(frozen=True, eq=False)
class Peer:
    """A client as its server knows it, for the life of one connection.

    Attributes:
        link: name of the link on which the client connected.
        key: routing identity of the connection.
        hello: the client's Hello.
        dims: sizes of the arrays in its messages, by their letters: N, O, A.
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
    """Why a client left, as far as anything is decided by it; the values are the reasons in a Bye."""

    STOPPED = "stopped"  # its process ends in order
    RECONNECTED = "connected anew"  # the same process is back on another connection
    OTHER = ""  # any other reason

    @classmethod
    def of(cls, bye: Bye) -> Farewell:
        """What a Bye means: the only place that reads its text."""
        return next((farewell for farewell in cls if farewell.value == bye.reason), cls.OTHER)


Origin = Peer | str
"""Where an input comes from or an output goes to: a client, or the name of the link to a server."""
Input = tuple[Origin, Message]
Output = tuple[Origin, Message]


class Core(Protocol):
    """The pure part of a node: no sockets, files or clocks."""

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived; return what to send. ``now`` is in seconds."""
