"""Links within one process. They use the same handshake and bytes as ZeroMQ, with queues in memory."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from td3_robot.core_types import Input, Origin
from td3_robot.errors import EndpointError
from td3_robot.messages import Bye, Message
from td3_robot.topics import QUEUE_LENGTH
from td3_robot.transport import codec
from td3_robot.transport.codec import Frames
from td3_robot.transport.interface import Transport
from td3_robot.transport.link import ClientLink, ServerLink


@dataclass(eq=False)
class Connection:
    """The connection of a client to an endpoint."""

    endpoint: str
    key: bytes  # routing identity, unique among all connections
    client: MemoryBus
    link: str
    waiting: deque[Frames] = field(default_factory=deque)  # frames that wait until a server starts at the endpoint
    closed: bool = False


class Network:
    """Connects the buses of one process. An endpoint is any text."""

    def __init__(self) -> None:
        self.servers: dict[str, MemoryBus] = {}
        self.connections: dict[bytes, Connection] = {}
        self._keys = itertools.count()

    def connect(self, endpoint: str, client: MemoryBus, link: str) -> Connection:
        key = b"%d" % next(self._keys)
        connection = self.connections[key] = Connection(endpoint, key, client, link)
        return connection

    def to_server(self, connection: Connection, frames: Frames) -> bool:
        """Queue frames for the server of a connection. Returns False if the queue is full.

        The server may start later.
        """
        server = self.servers.get(connection.endpoint)
        if server:
            return server.offered(connection, frames)
        if len(connection.waiting) >= QUEUE_LENGTH:
            return False
        connection.waiting.append(frames)
        return True


class MemoryBus(Transport):
    """The links of one node in memory. A test can replace ``deliver`` to lose, change or reorder frames.

    Args:
        network: shared by the buses that connect to each other.
        clock: a clock in seconds. All connected buses share it.
    """

    def __init__(self, network: Network, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._network = network
        self._endpoints: dict[str, str] = {}  # names of the served links, by endpoint
        self._connections: dict[str, Connection] = {}  # connections as a client, by name of the link
        self._inbox: deque[tuple[Connection, Frames]] = deque()
        self._queued: Counter[Connection] = Counter()  # number of messages in the inbox, by connection

    def serve(self, endpoint: str, server: ServerLink) -> str:
        """Serve an endpoint. A second call on the same bus simulates a restart of the server."""
        if self._network.servers.setdefault(endpoint, self) is not self:
            raise EndpointError(f"endpoint {endpoint!r} is busy: another bus serves it")
        self.servers[server.link] = server
        self._endpoints[endpoint] = server.link
        for connection in self._network.connections.values():
            while connection.endpoint == endpoint and connection.waiting:
                self.offered(connection, connection.waiting.popleft())
        return endpoint

    def connect(self, endpoint: str, client: ClientLink) -> None:
        """Connect a client.

        The bus sends the client's Hello in the next ``receive``, or in the next ``send`` on this link.
        """
        self.clients[client.link], client.endpoint = client, endpoint
        self._connections[client.link] = self._network.connect(endpoint, self, client.link)

    def move(self, link: str, endpoint: str) -> None:
        self._connections[link].closed = True
        self.connect(endpoint, self.clients[link])
        self.join_again(link, self.clients[link].hello)

    def send(self, to: Origin, message: Message) -> bool:
        """Send a message. If a Hello is due, send the Hello first. See :meth:`Transport.send`."""
        client = self.clients.get(to) if isinstance(to, str) else None
        if client and client.state == "connecting":
            self._introduce(client, self._clock())
        return super().send(to, message)

    def receive(self, timeout: float) -> list[Input]:
        """Return all inputs that have arrived. This method never waits.

        All buses of a network run in the same thread, so no message could arrive during a wait.
        """
        del timeout
        now = self._clock()
        inputs, self._waiting = self._waiting, []
        while self._inbox:
            connection, frames = self._inbox.popleft()
            self._queued[connection] -= 1
            if connection.client is self:
                inputs += self._from_server(self.clients[connection.link], frames, now)
            else:
                server = self.servers[self._endpoints[connection.endpoint]]
                inputs += self._from_client(server, connection.key, frames, now)
        for client in self.clients.values():
            client.check()
            self._introduce(client, now)
        for link, key in sorted(self._unreachable):
            inputs += self.servers[link].forget(key, "connection closed")
        self._unreachable.clear()
        for server in self.servers.values():
            inputs += server.expire(now)
        return inputs

    def close(self, reason: str = "", *, in_order: bool = True) -> None:
        """Leave every link. Messages that this bus has not received yet are lost."""
        for link, connection in self._connections.items():
            if self.welcome(link) and in_order:
                self._post(link, Bye(reason))
            connection.closed = True
        for endpoint in self._endpoints:
            del self._network.servers[endpoint]
        self._endpoints.clear()

    def offered(self, connection: Connection, frames: Frames) -> bool:
        """Take frames from the other end of a connection. Returns False if the queue of this bus is full."""
        if self._queued[connection] >= QUEUE_LENGTH:
            return False
        self.deliver(connection, frames)
        return True

    def deliver(self, connection: Connection, frames: Frames) -> None:
        """Put frames from the other end of a connection into this bus's inbox."""
        self._inbox.append((connection, frames))
        self._queued[connection] += 1

    def _post(self, link: str, message: Message, key: bytes | None = None) -> bool:
        frames = [message.NAME.encode(), codec.encode(message)]
        if key is None:
            return self._network.to_server(self._connections[link], frames)
        connection = self._network.connections[key]
        if connection.closed:
            self._unreachable.add((link, key))
            return False
        return connection.client.offered(connection, frames)
