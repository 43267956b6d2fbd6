"""ZeroMQ under the sessions: sockets, their options, polling. One bus a process, used from one thread."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import zmq

from td3_robot.errors import EndpointError
from td3_robot.messages import Bye, Message
from td3_robot.specs import RobotSpec
from td3_robot.topics import QUEUE_LENGTH
from td3_robot.transport import codec, endpoints
from td3_robot.transport.session import ClientSession, Input, Origin, Peer, ServerSession
from td3_robot.transport.tap import Tap

_DRAIN = 256  # messages taken from one socket before the others get their turn
_TIMER = 0.1  # seconds: the longest sleep before handshakes and time-outs are looked at
MAX_FRAME = codec.MAX_BYTES + 1024
"""Bytes of a frame, beyond which libzmq closes the connection that sends it."""


class Bus:
    """All links of one process.

    Not thread-safe, as ZeroMQ's sockets are not. ``clock`` is a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = zmq.Context()
        self._clock = clock
        self._poller = zmq.Poller()
        self._servers: dict[str, tuple[zmq.Socket[bytes], ServerSession]] = {}
        self._clients: dict[str, tuple[zmq.Socket[bytes], ClientSession]] = {}
        self._tap: tuple[zmq.Socket[bytes], Tap] | None = None
        self._paths: list[Path] = []
        self._waiting: list[Input] = []
        self._next_timer = float("-inf")
        self.counts: Counter[str] = Counter()

    def serve(self, endpoint: str, session: ServerSession) -> str:
        """Bind a server; returns the endpoint really bound (``tcp://HOST:*`` takes a free port).

        Raises:
            EndpointError: busy, malformed or not allowed.
        """
        endpoints.check(endpoint, bind=True)
        socket = self._socket(zmq.ROUTER, endpoint)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells a full queue from a client that is gone
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise EndpointError(f"endpoint {endpoint!r} cannot be served: {error}") from None
        bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if bound.startswith("ipc://"):
            path = Path(bound.removeprefix("ipc://"))
            path.chmod(0o600)
            self._paths.append(path)
        self._servers[session.link] = (socket, session)
        self._poller.register(socket, zmq.POLLIN)
        return bound

    def connect(self, endpoint: str, session: ClientSession) -> None:
        """Connect a client; the server need not be there yet.

        Raises:
            EndpointError: malformed or not allowed.
        """
        self._clients[session.link] = (self._connected(endpoint), session)

    def record(self, endpoint: str, session: ClientSession, *, expected: bool = False) -> None:
        """Offer whatever this bus sends to the recorder at an endpoint, see :class:`~td3_robot.transport.tap.Tap`.

        Raises:
            EndpointError: malformed or not allowed.
        """
        socket = self._connected(endpoint, immediate=True)
        self._tap = socket, Tap(session, lambda name, payload: self._post(socket, [name.encode(), payload]), expected)

    def _connected(self, endpoint: str, *, immediate: bool = False) -> zmq.Socket[bytes]:
        """A DEALER; an ``immediate`` one takes nothing while there is no connection."""
        endpoints.check(endpoint, bind=False)
        socket = self._socket(zmq.DEALER, endpoint)
        socket.setsockopt(zmq.IMMEDIATE, immediate)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise EndpointError(f"endpoint {endpoint!r} cannot be connected to: {error}") from None
        self._poller.register(socket, zmq.POLLIN)
        self._next_timer = float("-inf")
        return socket

    def receive(self, timeout: float) -> list[Input]:
        """Inputs from all links, in the order each link delivered them; waits up to ``timeout`` seconds for one.

        Raises:
            HandshakeError: a server refused us.
        """
        end = self._clock() + timeout
        while True:
            inputs, self._waiting = self._waiting, []
            now = self._clock()
            wait = 0.0 if inputs else max(0.0, min(end, self._next_timer) - now)
            for socket, _ in self._poller.poll(math.ceil(wait * 1e3)):
                inputs += self._drain(socket)
            now = self._clock()
            if now >= self._next_timer:  # after draining: whoever spoke while we were busy is not silent
                self._next_timer = now + _TIMER
                self._timers(now)
            if inputs or now >= end:
                return inputs

    def send(self, to: Origin, message: Message) -> bool:
        """Hand a message to its link; False if its queue is full (ask again or count it lost) or the peer is gone."""
        if isinstance(to, Peer):
            socket, server = self._servers[to.link]
            return to.key in server.peers and self._reply(socket, server, to.key, message)
        socket, client = self._clients[to]
        if self._say(socket, to, message):
            client.sent(self._clock())
            return True
        return False

    def welcome(self, link: str) -> bool:
        """Whether the server of a link has welcomed us."""
        return self._clients[link][1].state == "welcome"

    def links(self) -> list[str]:
        """The links that this bus is a client of."""
        return list(self._clients)

    def peers(self, link: str) -> list[Peer]:
        """The clients of a link that this bus serves."""
        return list(self._servers[link][1].peers.values())

    def dropped(self) -> Counter[str]:
        """Malformed, refused and unexpected input by kind, over all links."""
        total = Counter(self.counts)
        for _, session in self._links():
            total += session.tally.counts
        return total + self._tap[1].counts() if self._tap else total

    def close(self, reason: str = "") -> None:
        """Say Bye on every link that was welcomed, close all sockets and remove their files."""
        for link, (socket, session) in self._clients.items():
            if session.state == "welcome":
                self._say(socket, link, Bye(reason))
        if self._tap:
            self._tap[1].leave(reason)
            self._tap[0].close(linger=200)
        for socket, _ in self._links():
            socket.close(linger=200)  # ms: the Byes, not a backlog
        self._context.term()
        for path in self._paths:
            with contextlib.suppress(OSError):
                path.unlink()

    def _links(self) -> list[tuple[zmq.Socket[bytes], ServerSession | ClientSession]]:
        return [*self._servers.values(), *self._clients.values()]

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """A socket with every option set that must come before bind or connect (FIELD_NOTES: later ones do nothing)."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
        return socket

    def _timers(self, now: float) -> None:
        for link, (socket, client) in self._clients.items():
            client.check()
            for message in client.due(now):
                self._say(socket, link, message)
        if self._tap:
            self._tap[1].turn(now)
        for _, server in self._servers.values():
            self._waiting += server.expire(now)

    def _drain(self, socket: zmq.Socket[bytes]) -> list[Input]:
        inputs: list[Input] = []
        now = self._clock()
        session = next((session for other, session in self._links() if other is socket), None)
        for _ in range(_DRAIN):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            if session is None:
                if self._tap:
                    self._tap[1].receive(frames, now)
                continue
            if isinstance(session, ClientSession):
                inputs += session.receive(frames, now)
                for message in session.due(now):
                    self._say(socket, session.link, message)
                continue
            received, replies = session.receive(frames[0], frames[1:], now)
            inputs += received
            for key, message in replies:
                self._reply(socket, session, key, message)
        return inputs

    def adopt(self, link: str, spec: RobotSpec) -> None:
        """Tell a server which robot it serves, see ``ServerSession.adopt``."""
        socket, session = self._servers[link]
        inputs, replies = session.adopt(spec)
        self._waiting += inputs
        for key, message in replies:
            self._reply(socket, session, key, message)

    def _reply(self, socket: zmq.Socket[bytes], session: ServerSession, key: bytes, message: Message) -> bool:
        try:
            return self._say(socket, session.link, message, key)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._waiting += session.forget(key, "connection closed")
            return False

    def _say(self, socket: zmq.Socket[bytes], link: str, message: Message, *to: bytes) -> bool:
        payload = codec.encode(message)
        sent = self._post(socket, [*to, message.NAME.encode(), payload])
        if sent and self._tap:
            self._tap[1].offer(link, message, payload)
        return sent

    @staticmethod
    def _post(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        try:
            socket.send_multipart(frames, zmq.DONTWAIT, copy=len(frames[-1]) < 65536)
        except zmq.Again:
            return False
        return True
