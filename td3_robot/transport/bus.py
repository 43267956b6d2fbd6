"""The transport over ZeroMQ: sockets, their options, polling."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from td3_robot.core_types import Input
from td3_robot.errors import EndpointError
from td3_robot.messages import Bye, Hello, Message, Refused, Welcome
from td3_robot.topics import QUEUE_LENGTH, RECORDER
from td3_robot.transport import codec, curve, endpoints
from td3_robot.transport.attach import LOOK_PERIOD, Search
from td3_robot.transport.departures import Departures
from td3_robot.transport.frames import Receiver
from td3_robot.transport.interface import Transport
from td3_robot.transport.keys import REVOCATION_TIME, AllowList
from td3_robot.transport.link import HEARTBEAT_PERIOD, PEER_TIMEOUT, ClientLink, ServerLink
from td3_robot.transport.tally import Tally
from td3_robot.transport.tap import Copies, Tap

log = logging.getLogger(__name__)

_IO_THREADS = 2  # with two threads, a stranger's large data delays only half of the connections
_FAREWELL = 1000  # ms that a closing socket may take to send its last messages
_DRAIN = 256  # maximum number of messages to take from one socket before the other sockets get their turn
LINGER = 10
"""Milliseconds that a closing socket may take if nobody needs its last messages.

With 0, libzmq 4.3.5 can abort the process if a peer leaves while the socket closes. The time is shorter than
RECONNECT_IVL, so the socket does not connect to another peer.
"""
FOREIGN = 16
"""Maximum number of foreign messages to take from one socket in one turn. A foreign message gives the core no input.
For example, it comes from a stranger, is malformed, or is a Heartbeat. The limit keeps the core's delay short."""
_TURN = 0.001  # maximum seconds for one socket in one turn, so that a flood from one peer does not block others
_TIMER = REVOCATION_TIME  # seconds between two checks of handshakes, timeouts and keys
_DELIVERY = 0.5  # seconds in which libzmq delivers the messages that arrived while this process was suspended
_DEAD = 5_000  # ms without an answer of a TCP peer until the connection ends; its client then connects again
_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)  # plain integers are faster than enum flags
_READABLE, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
_COPIED = 65536  # bytes; the bus sends a frame of this size or larger without copying it
_MARGIN = 1024  # bytes by which a frame may exceed the longest message
MAX_FRAME = codec.MAX_BYTES + _MARGIN
"""Largest frame, in bytes. libzmq closes a connection that sends a larger frame. A link with short messages sets a
lower limit."""


class Bus(Transport):
    """All links of one process over ZeroMQ.

    Args:
        keys: the keys for CURVE on every TCP link, or None. Set them before the first link.

    Attributes:
        spin: after an input, :meth:`receive` polls for this number of seconds without sleeping. A sleeping processor
            core takes long to wake up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, keys: AllowList | None = None) -> None:
        super().__init__(clock)
        self.keys = keys
        self.spin = 0.0
        self._context = zmq.Context(io_threads=_IO_THREADS)
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # by link
        self._take: dict[zmq.Socket[bytes], Callable[[float], list[Input]]] = {}  # argument: the time in seconds
        self._read_other: dict[zmq.Socket[bytes], Callable[[float], None]] = {}  # for sockets that carry no messages
        self._gatekeeper: curve.Gatekeeper | None = None
        self._dialled: list[curve.Dialled] = []
        self._departures: dict[str, Departures] = {}  # by link
        self._tally = Tally()
        self._receiver = Receiver(_TURN, clock)
        self._copies: Copies | None = None  # None until the first call of record or attach
        self._taps: dict[Tap, zmq.Socket[bytes]] = {}
        self._searches: list[Search] = []
        self._next_look = float("-inf")
        self._lost: Counter[str] = Counter()  # the counts of Tap.counts() from listeners that have detached
        self._paths: dict[Path, int] = {}  # socket files that this process serves, with their inodes
        self._behind: dict[str, float] = {}  # by link: time (s) at which unread messages began to wait
        self._next_timer = self._timed_at = self._awake_since = self._awake_until = float("-inf")

    def serve(self, endpoint: str, server: ServerLink) -> str:
        """Bind a server. ``tcp://HOST:*`` takes a free port. See :meth:`Transport.serve`.

        A second call with the same server binds one more endpoint. The first endpoint must be a socket file, and the
        second endpoint must use TCP with keys. Clients at the socket file need no keys, and may have any role.
        """
        again = self.servers.get(server.link) is server
        with endpoints.binding(endpoint):
            endpoints.check(endpoint, bind=True, keys=self.keys is not None)
            socket = self._sockets[server.link] if again else self._socket_for(server)
            try:
                self._bind(socket, endpoint, server)
            except zmq.ZMQError as error:
                if not again:
                    socket.close()
                raise EndpointError(f"endpoint {endpoint!r} cannot be served: {error}") from None
        bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if not again:
            self.servers[server.link] = server
            self._sockets[server.link] = socket
            self._take[socket] = lambda now: self._from_some_client(socket, server, now)
            self._poller.register(socket, zmq.POLLIN)
        return bound

    def _socket_for(self, server: ServerLink) -> zmq.Socket[bytes]:
        """A ROUTER socket for a server."""
        kinds = (kind for accepted in server.accepts.values() for kind in accepted)
        socket = self._socket(zmq.ROUTER, {Hello, *kinds})
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # distinguishes a full queue from a closed connection
        departures = Departures(socket, server, keys=self.keys is not None)
        self._departures[server.link] = departures
        self._register(departures.monitor, departures.read)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str, server: ServerLink) -> None:
        """Bind a socket. Only this user can open the file of an ``ipc://`` endpoint.

        The options that this method sets apply to the new endpoint, and not to earlier endpoints of the socket.
        """
        self._set_network(socket, endpoint)
        if self.keys and endpoints.is_tcp(endpoint):
            if self._gatekeeper is None:
                self._gatekeeper = curve.Gatekeeper(self._context, self.keys, self._tally)
                self._register(self._gatekeeper.socket, self._gatekeeper.read)
            curve.as_server(socket, server.link, self.keys)
            server.may = self.keys.may
        elif not self.keys:
            # A ZAP domain makes libzmq refuse ZMTP 1.0 and 2.0. A web page can send ZMTP 1.0 in an HTTP request to a
            # TCP endpoint. libzmq 4.3.5 can abort if a client with ZMTP 1.0 or 2.0 connects while the server closes.
            socket.setsockopt(zmq.ZAP_DOMAIN, server.link.encode())
        socket.bind(endpoint)
        if not endpoints.is_tcp(endpoint):
            path = Path(endpoint.removeprefix("ipc://"))
            path.chmod(endpoints.SOCKET_MODE)
            self._paths[path] = path.stat().st_ino
            server.without_keys = True

    def connect(self, endpoint: str, client: ClientLink) -> None:
        socket = self._connected(endpoint, client)
        self.clients[client.link] = client
        self._sockets[client.link] = socket
        self._take[socket] = lambda now: self._from_server(client, self._receiver.frames(socket), now)
        self._introduce(client, self._clock())  # send Hello before any other message

    def move(self, link: str, endpoint: str) -> None:
        endpoints.check(endpoint, bind=False, keys=self.keys is not None)
        client, socket = self.clients[link], self._sockets[link]
        with contextlib.suppress(zmq.ZMQError):  # libzmq may have closed the connection already
            socket.disconnect(client.endpoint)
        for dialled in self._dialled:
            if dialled.client is client:
                dialled.moved()
        self._dial(socket, endpoint, client)
        self.join_again(link, client.hello)

    def record(self, endpoint: str, client: ClientLink, *, expected: bool = False) -> Tap:
        """Connect to a recorder or monitor, and send it a copy of each message that this bus sends, except Heartbeats.

        Args:
            client: the handshake with the recorder or monitor.
            expected: whether the configuration enables this recorder, see :class:`~td3_robot.transport.tap.Tap`.

        Raises:
            EndpointError: the endpoint is malformed or not allowed.
        """
        socket = self._connected(endpoint, client, immediate=True)

        def post(name: str, payload: bytes) -> bool:
            return self._write(socket, [name.encode(), payload])

        self._copies = self._copies or Copies()
        tap = self._copies.tap(client, post, expected)
        self._taps[tap] = socket
        self._take[socket] = lambda now: tap.receive(self._receiver.frames(socket), now)
        return tap

    def attach(self, search: Search) -> None:
        """Send copies of the messages to the listeners that the search finds, until they detach. See :meth:`record`."""
        self._copies = self._copies or Copies()
        self._searches.append(search)

    def _connected(self, endpoint: str, client: ClientLink, *, immediate: bool = False) -> zmq.Socket[bytes]:
        """A connected DEALER socket. With ``immediate``, the socket accepts messages only while a connection exists."""
        endpoints.check(endpoint, bind=False, keys=self.keys is not None)
        socket = self._socket(zmq.DEALER, {Welcome, Refused, *client.accepts})
        socket.setsockopt(zmq.IMMEDIATE, immediate)
        if endpoints.is_tcp(endpoint):
            dialled = curve.Dialled(socket, client, self.keys, self._tally)
            self._dialled.append(dialled)
            self._register(dialled.monitor, dialled.read)
        try:
            self._dial(socket, endpoint, client)
        except EndpointError:
            socket.close()
            raise
        self._poller.register(socket, zmq.POLLIN)
        self._next_timer = float("-inf")
        return socket

    def _dial(self, socket: zmq.Socket[bytes], endpoint: str, client: ClientLink) -> None:
        """Connect a socket to an endpoint. Raise EndpointError if libzmq refuses the endpoint."""
        self._set_network(socket, endpoint)
        client.endpoint = endpoint
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise EndpointError(f"cannot connect to endpoint {endpoint!r}: {error}") from None

    def _register(self, socket: zmq.Socket[bytes], read: Callable[[float], None]) -> None:
        """Call ``read`` with the time (s) whenever the socket is readable. The socket carries no messages."""
        self._read_other[socket] = read
        self._poller.register(socket, zmq.POLLIN)

    def receive(self, timeout: float) -> list[Input]:
        end = self._clock() + timeout
        while True:
            inputs, self._waiting = self._waiting, []
            now = self._clock()
            for tap in self._taps:  # send copies only here, after the caller has sent the core's outputs
                tap.flush(now)
            wait = 0.0 if inputs or self._unreachable else max(0.0, min(end, self._next_timer) - now)
            for socket, _ in self._readable(now + wait, now):
                inputs += self._drain(socket)
            if self._unreachable:
                inputs += self._forget_unreachable()
            now = self._clock()
            if now >= self._next_timer:
                self._next_timer = now + _TIMER
                self._timers(now)
            if inputs:
                self._awake_until = now + self.spin
                return inputs
            if now >= end:
                return inputs

    def _readable(self, end: float, now: float) -> list[tuple[Any, int]]:
        """Wait until ``end`` (s) for readable sockets, and return them."""
        while now < min(end, self._awake_until):
            if ready := self._poller.poll(0):
                return ready
            os.sched_yield()  # libzmq's threads may need this processor core to deliver messages
            now = self._clock()
        return self._poller.poll(math.ceil(max(0.0, end - now) * 1e3))

    def flush(self) -> None:
        for tap in self._taps:
            tap.flush(self._clock(), at_once=True)

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        if self._copies:
            self._copies.record_turn(now, inputs)

    def _detach(self, tap: Tap) -> None:
        """Close the connection to a listener, and keep the counts of its tap."""
        assert self._copies
        self._copies.taps.remove(tap)
        socket = self._taps.pop(tap)
        self._lost += tap.counts()
        self._poller.unregister(socket)
        del self._take[socket]
        socket.close(linger=LINGER)

    def dropped(self) -> Counter[str]:
        total = super().dropped() + self._lost
        for tap in self._taps:
            total += tap.counts()
        return total

    def _tallies(self) -> list[Tally]:
        return [*super()._tallies(), self._tally]

    def close(self, reason: str = "", *, in_order: bool = True) -> None:
        for link in self.clients:
            if self.welcome(link) and in_order:
                self._post(link, Bye(reason))
        for socket in self._read_other:
            socket.close(linger=0)
        for tap, socket in self._taps.items():
            tap.leave(reason, self._clock())
            socket.close(linger=_FAREWELL)
        for link, socket in self._sockets.items():
            unmet = link in self.clients and self.clients[link].session is None
            socket.close(linger=0 if unmet else _FAREWELL)  # do not wait for Hellos that no server answered
        for path, inode in self._paths.items():  # compare inodes: a new server may have replaced the file
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._context.term()

    def _socket(self, kind: int, accepts: set[type[Message]]) -> zmq.Socket[bytes]:
        """A new socket with the options that all endpoints share. libzmq ignores most options after bind or connect."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.MAXMSGSIZE, max(message.MAX_BYTES for message in accepts) + _MARGIN)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    @staticmethod
    def _set_network(socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Set the options that depend on the kind of the endpoint."""
        socket.setsockopt(zmq.IPV6, endpoints.ipv6(endpoint))
        if endpoints.is_tcp(endpoint):  # a TCP peer can vanish without closing its connection
            socket.setsockopt(zmq.HANDSHAKE_IVL, _DEAD)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _DEAD)
            # The kernel detects dead connections. libzmq's own heartbeats would detect them, too. But libzmq 4.3.5
            # aborts if such a heartbeat is due after a peer has left, while the peer's messages still fill the queue.
            socket.setsockopt(zmq.TCP_MAXRT, _DEAD)  # for data that the peer does not acknowledge, or has no room for
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # while no data is sent; TCP_MAXRT limits the time here, too
            for option in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL):
                socket.setsockopt(option, 1)  # s

    def _timers(self, now: float) -> None:
        """Check keys, failed handshakes, refusals, heartbeats, listeners and silent clients at time ``now`` (s)."""
        if self.keys and (change := self.keys.refresh()):
            log.warning("%s", change)
            for server in self.servers.values():
                self._waiting += server.forget_revoked()
        for dialled in self._dialled:
            dialled.turn(now)
        for client in self.clients.values():
            client.check()
            self._introduce(client, now)
        for tap in self._taps:
            tap.turn(now)
        if now >= self._next_look:
            self._next_look = now + LOOK_PERIOD
            for search in self._searches:
                search.turn(self.record, self._detach)
        self._expire(now)

    def _expire(self, now: float) -> None:
        """Forget silent clients after the bus has read the messages that arrived.

        After a suspension, wait for _DELIVERY seconds before forgetting silent clients. If messages stay unread for
        PEER_TIMEOUT, forget silent clients anyway.
        """
        if now - self._timed_at > HEARTBEAT_PERIOD:  # this process and libzmq's threads were suspended
            self._behind.clear()
            self._awake_since = now
        self._timed_at = now
        for link, server in self.servers.items():
            unread = self._has_more(self._sockets[link])
            since = self._behind.setdefault(link, now) if unread else self._behind.pop(link, now)
            if not unread:
                self._departures[link].turn(now)
            read = not unread and now - self._awake_since >= _DELIVERY
            if read or now - since > PEER_TIMEOUT:
                self._waiting += server.expire(now)

    def _drain(self, socket: zmq.Socket[bytes]) -> list[Input]:
        """Read the messages of one socket, up to the limits of one turn."""
        now = self._clock()
        if read := self._read_other.get(socket):
            read(now)
            return []
        inputs: list[Input] = []
        take, foreign = self._take[socket], 0
        for _ in range(_DRAIN):
            before = len(inputs)
            try:
                self._receiver.finish(socket)
                inputs += take(now)
            except zmq.Again:
                break
            foreign += len(inputs) == before
            if foreign >= FOREIGN:
                break
            # Check for a message first: reading an empty socket raises zmq.Again, and this takes as long as reading a
            # message.
            if not self._has_more(socket) or self._clock() - now > _TURN:
                break
        return inputs

    @staticmethod
    def _has_more(socket: zmq.Socket[bytes]) -> bool:
        """Whether a message can be read now."""
        return bool(int(socket.get(_EVENTS)) & _READABLE)

    def _from_some_client(self, socket: zmq.Socket[bytes], server: ServerLink, now: float) -> list[Input]:
        """Take the next message from a ROUTER. Raises zmq.Again if there is none."""
        if server.may is None:
            return self._from_client(server, socket.recv(_NOW), self._receiver.frames(socket), now)
        # Take the public key from the message, because a client can choose any routing identity.
        first = socket.recv(_NOW, copy=False)
        frames, owner = self._receiver.frames(socket), curve.owner(first)
        local = server.without_keys and not owner
        if not local and not (self.keys and self.keys.client(owner)):
            self._tally.note("revoked", f"link {server.link}: a message with the key {owner}", now)
            return []
        return self._from_client(server, first.bytes, frames, now, owner)

    def _forget_unreachable(self) -> list[Input]:
        """Forget each client that has closed its connection, if the server has already read its last messages."""
        inputs: list[Input] = []
        for link, key in sorted(self._unreachable):
            if not self._has_more(self._sockets[link]):
                self._unreachable.remove((link, key))
                inputs += self.servers[link].forget(key, "connection closed")
        return inputs

    def _post(self, link: str, message: Message, key: bytes | None = None) -> bool:
        payload = codec.encode(message)
        frames = [message.NAME.encode(), payload]
        try:
            sent = self._write(self._sockets[link], frames if key is None else [key, *frames])
        except zmq.ZMQError as error:
            if key is None or error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable.add((link, key))
            return False
        if sent and self._copies:
            self._copies.offer(link, message, payload)
        return sent

    def _offer(self, message: Message) -> None:
        if self._copies:
            self._copies.offer(RECORDER, message)

    @staticmethod
    def _write(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        """Send frames like ``send_multipart``, but without the checks that ``send_multipart`` makes in Python.

        Return False if the queue is full. If libzmq accepts the first frame, it accepts the others too.
        """
        *head, last = frames
        try:
            for frame in head:
                socket.send(frame, _MORE)
            socket.send(last, _NOW, copy=len(last) < _COPIED)
        except zmq.Again:
            return False
        return True
