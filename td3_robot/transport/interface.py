"""The interface of a transport, which holds the links of one process.

A transport only moves frames; :mod:`td3_robot.transport.link` does the handshake and decodes messages. Every
implementation passes the tests in ``tests/contract/transport.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

from td3_robot.core_types import Input, Origin, Peer
from td3_robot.messages import Hello, Message, Step
from td3_robot.specs import RobotSpec
from td3_robot.topics import RECORDER
from td3_robot.transport.codec import Frames
from td3_robot.transport.link import ClientLink, ServerLink
from td3_robot.transport.tally import Tally


class Transport(ABC):
    """All links of one process. Only one thread may use a transport.

    Each connection keeps the order of its messages. Each end has a queue for sending and a queue for receiving, with at
    most QUEUE_LENGTH messages each. A full queue takes no message. While the connection lasts, a transport drops no
    message from a queue.

    ``servers`` holds the links that this process serves. ``clients`` holds the links on which this process is a client.
    Both use the names of the links as keys.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.servers: dict[str, ServerLink] = {}
        self.clients: dict[str, ClientLink] = {}
        self._clock = clock
        self._waiting: list[Input] = []  # inputs for the next ``receive``
        self._unreachable: set[tuple[str, bytes]] = set()  # link and key of each client that closed its connection

    @abstractmethod
    def serve(self, endpoint: str, server: ServerLink) -> str:
        """Bind a server. Return the endpoint that clients connect to.

        Raises:
            EndpointError: the endpoint is busy, malformed or not allowed.
        """

    @abstractmethod
    def connect(self, endpoint: str, client: ClientLink) -> None:
        """Connect a client. The server may start later. The client sends Hello before any other message.

        Raises EndpointError if the endpoint is malformed or not allowed.
        """

    @abstractmethod
    def move(self, link: str, endpoint: str) -> None:
        """Connect a client to a new endpoint of its server. Queued messages to the old endpoint may be lost.

        The client then sends Hello again. Both endpoints must use TCP, or both ``ipc://``.

        Raises EndpointError if the endpoint is malformed or not allowed.
        """

    @abstractmethod
    def receive(self, timeout: float) -> list[Input]:
        """Wait up to ``timeout`` seconds for a first input. Return the inputs that have arrived.

        A transport may limit the inputs of one call, and return the others in the next calls. Inputs of one connection
        keep their order. Raises HandshakeError if the server of an essential link refused this process.
        """

    @abstractmethod
    def close(self, reason: str = "", *, in_order: bool = True) -> None:
        """Leave every link, and free the endpoints that this process serves.

        ``reason`` is the reason in the Byes. ``in_order`` is True at a normal exit. After a crash it is False: then
        only recorders and monitors get a Bye, so that no core mistakes the crash for a normal exit.
        """

    @abstractmethod
    def _post(self, link: str, message: Message, key: bytes | None = None) -> bool:
        """Queue a message for the server of a link, or for the client ``key`` of a served link.

        Returns:
            False if the queue is full, or if the client has closed its connection. In the second case, the transport
            adds the client to ``_unreachable``. ``receive`` reads the last messages, then forgets the client.
        """

    def send(self, to: Origin, message: Message) -> bool:
        """Queue a message for a peer.

        If this process has sent nothing to a server for LONG_SILENCE, the server has perhaps forgotten this process.
        Then this method first sends a Hello. If the message is a Step, this method does not queue the Step: after the
        Welcome, the core first repeats the Steps that the server lacks.

        Returns:
            False if the queue is full, if the client is gone, or if this method sent a Hello in place of a Step.
        """
        if isinstance(to, Peer):
            return to.key in self.servers[to.link].peers and self._reply(to.link, to.key, message)
        if to == RECORDER:
            self._offer(message)
            return True
        client, now = self.clients[to], self._clock()
        if client.needs_hello(now):
            self._introduce(client, now)
            if isinstance(message, Step):
                return False
        if self._post(to, message):
            client.sent_at = now
            return True
        return False

    def join_again(self, link: str, hello: Hello) -> None:
        """Introduce this process again, with this new Hello, before any later message on this link."""
        self.clients[link].join_again(hello)
        self._introduce(self.clients[link], self._clock())

    def adopt(self, link: str, spec: RobotSpec) -> None:
        """Serve this robot on a link from now on. Refuse and forget clients with another robot."""
        inputs, replies = self.servers[link].adopt(spec)
        self._waiting += inputs
        for key, message in replies:
            self._reply(link, key, message)

    def welcome(self, link: str) -> bool:
        """Whether the server of a link has welcomed this process."""
        return self.clients[link].state == "welcome"

    def peers(self, link: str) -> list[Peer]:
        """The clients of a link that this process serves."""
        return list(self.servers[link].peers.values())

    def dropped(self) -> Counter[str]:
        """The number of events on all links, by kind: malformed, refused, unexpected and lost messages, and others."""
        return sum((tally.counts for tally in self._tallies()), Counter[str]())

    def last_dropped(self) -> str:
        """The kind and the reason of the newest event that :meth:`dropped` counts; empty if there is none.

        Events on the links to recorders and monitors are left out.
        """
        return max((tally.last for tally in self._tallies()), default=(0.0, ""))[1]

    def _tallies(self) -> list[Tally]:
        return [server.tally for server in self.servers.values()] + [client.tally for client in self.clients.values()]

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:  # noqa: B027
        """Record the inputs of one turn of the core. ``now`` (s) is the time of this turn.

        Recorders get all inputs together, as one Turn. If an input is a Command or Teleop of an operator, recorders and
        monitors also get this input as a separate message.
        """

    def flush(self) -> None:  # noqa: B027
        """Send the messages that wait for recorders and monitors. Call this before a long time without receive()."""

    def _offer(self, message: Message) -> None:  # noqa: B027
        """Send a message to recorders and monitors only."""

    def _introduce(self, client: ClientLink, now: float) -> None:
        """Send the messages of the handshake that are due at ``now`` (s)."""
        for message in client.due(now):
            self._post(client.link, message)

    def _reply(self, link: str, key: bytes, message: Message) -> bool:
        """Send a message to a client. Return False if the queue is full or the client is gone."""
        if not self._post(link, message, key):
            return False
        self._unreachable.discard((link, key))  # a new process may use the identity of a client that left
        return True

    def _from_server(self, client: ClientLink, frames: Frames, now: float) -> list[Input]:
        """Take one message from a server. Send an answer if the handshake needs it."""
        inputs = client.receive(frames, now)
        if client.state != "welcome":
            self._introduce(client, now)
        return inputs

    def _from_client(self, server: ServerLink, key: bytes, frames: Frames, now: float, owner: str = "") -> list[Input]:
        """Take one message from a client, and send the direct replies."""
        inputs, replies = server.receive(key, frames, now, owner)
        for to, message in replies:
            self._reply(server.link, to, message)
        return inputs
