"""The transport over ZeroMQ: sockets, their options, polling."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from td3_robot.core_types import Input
from td3_robot.errors import EndpointError
from td3_robot.messages import Bye, Message
from td3_robot.topics import QUEUE_LENGTH, RECORDER
from td3_robot.transport import codec, curve, endpoints
from td3_robot.transport.frames import Receiver, longest_frame
from td3_robot.transport.interface import ClientGoneError, Transport
from td3_robot.transport.keys import REVOCATION_TIME, AllowList
from td3_robot.transport.link import HEARTBEAT_PERIOD, PEER_TIMEOUT, ClientLink, ServerLink, Tally
from td3_robot.transport.tap import Tap

log = logging.getLogger(__name__)

_IO_THREADS = 2  # libzmq spreads connections over its threads: large data of a stranger delays only half of the others
_FAREWELL = 1000  # ms that a closing socket may take to send its last messages
_DRAIN = 256  # messages to take from one socket before the others get their turn
FOREIGN = 16
"""The most messages that give the core no input (from strangers, malformed, or part of a handshake) to take from one
socket before the others get their turn. A flood of such messages can then delay the core only a little."""
_TURN = 0.001  # seconds to spend on one socket, so that a peer that floods this process does not starve the others
_TIMER = REVOCATION_TIME  # seconds between two checks of handshakes, timeouts and keys
_ON_THE_WAY = 0.5  # seconds for libzmq to deliver messages that arrived while this process stood still
_RETRY = 1.0  # seconds until a client repeats a failed handshake; libzmq itself gives up when a server refuses
_DEAD = 5_000  # ms of silence until libzmq closes a TCP connection; its client then connects again
_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)  # plain integers are faster than enum flags
_READABLE, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
_COPIED = 65536  # bytes above which a frame is sent without copying it
MAX_FRAME = codec.MAX_BYTES + 1024
"""Largest frame, in bytes. libzmq closes a connection that sends a larger one. A link whose messages are all shorter
sets a lower limit."""


@dataclass(frozen=True, eq=False)
class _Pin:
    """A client's link with keys: where its server is, and the server's key."""

    endpoint: str
    key: str
    socket: zmq.Socket[bytes]
    client: ClientLink


class Bus(Transport):
    """All links of one process over ZeroMQ. Used from one thread, because ZeroMQ's sockets are not thread-safe.

    Args:
        clock: a monotonic clock, in seconds.
        keys: with keys every TCP link uses CURVE. Set them before the first link.

    Attributes:
        spin: seconds after an input during which :meth:`receive` polls without sleeping, because a sleeping processor
            core takes long to wake up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, keys: AllowList | None = None) -> None:
        super().__init__(clock)
        self.keys = keys
        self.spin = 0.0
        self._context = zmq.Context(io_threads=_IO_THREADS)
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # by link
        self._ends: dict[zmq.Socket[bytes], ServerLink | ClientLink] = {}
        self._others: dict[zmq.Socket[bytes], Callable[[float], None]] = {}  # called with the time when readable
        self._guarded: set[str] = set()  # links served with keys
        self._pinned: dict[str, _Pin] = {}  # by link
        self._gatekeeper: curve.Gatekeeper | None = None
        self._watchers: list[curve.Watcher] = []
        self._retries: dict[str, float] = {}  # by link: time (s) to connect again
        self._tally = Tally()
        self._receiver = Receiver(_TURN, clock)
        self._taps: list[tuple[zmq.Socket[bytes], Tap]] = []
        self._paths: dict[Path, int] = {}  # socket files that this process serves, with their inodes
        self._behind: dict[str, float] = {}  # served links with unread messages: since when (s)
        self._next_timer = self._timed_at = self._awake_since = float("-inf")
        self._awake_until = float("-inf")

    def serve(self, endpoint: str, server: ServerLink) -> str:
        """Bind a server; returns the bound endpoint (``tcp://HOST:*`` takes a free port).

        Raises:
            EndpointError: busy, malformed or not allowed.
        """
        endpoints.check(endpoint, bind=True, keys=self.keys is not None)
        socket = self._socket(zmq.ROUTER, endpoint, server)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # distinguishes a full queue from a closed connection
        if self.keys and endpoints.is_tcp(endpoint):
            if self._gatekeeper is None:
                self._gatekeeper = curve.Gatekeeper(self._context, self.keys, self._tally)
                self._others[self._gatekeeper.socket] = self._gatekeeper.answer
                self._poller.register(self._gatekeeper.socket, zmq.POLLIN)
            curve.as_server(socket, server.link, self.keys)
            server.may = self.keys.may
            self._guarded.add(server.link)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise EndpointError(f"endpoint {endpoint!r} cannot be served: {error}") from None
        bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if bound.startswith("ipc://"):
            path = Path(bound.removeprefix("ipc://"))
            path.chmod(0o600)
            self._paths[path] = path.stat().st_ino
        self.servers[server.link] = server
        self._sockets[server.link], self._ends[socket] = socket, server
        self._poller.register(socket, zmq.POLLIN)
        return bound

    def connect(self, endpoint: str, client: ClientLink) -> None:
        """Connect a client. The server may start later.

        Raises:
            EndpointError: malformed or not allowed.
        """
        socket = self._connected(endpoint, client)
        self.clients[client.link] = client
        self._sockets[client.link], self._ends[socket] = socket, client
        self._introduce(client, self._clock())  # now, so that Hello goes out before any other message

    def record(self, endpoint: str, client: ClientLink, *, expected: bool = False) -> None:
        """Offer every message that this bus sends to the recorder or monitor at an endpoint, see
        :class:`~td3_robot.transport.tap.Tap`.

        Raises:
            EndpointError: malformed or not allowed.
        """
        socket = self._connected(endpoint, client, immediate=True)
        tap = Tap(client, lambda name, payload: self._write(socket, [name.encode(), payload]), expected)
        self._taps.append((socket, tap))
        self._others[socket] = lambda now: self._hear_listener(socket, tap, now)

    def _connected(self, endpoint: str, client: ClientLink, *, immediate: bool = False) -> zmq.Socket[bytes]:
        """A connected DEALER. With ``immediate`` it refuses messages while there is no connection."""
        endpoints.check(endpoint, bind=False, keys=self.keys is not None)
        socket = self._socket(zmq.DEALER, endpoint, client)
        socket.setsockopt(zmq.IMMEDIATE, immediate)
        if self.keys and endpoints.is_tcp(endpoint):
            curve.as_client(socket, client.link, self.keys)
            self._pinned[client.link] = _Pin(endpoint, self.keys.server(client.link), socket, client)
            watcher = curve.Watcher(socket, client.link, self.keys, self._tally)
            self._watchers.append(watcher)
            self._others[watcher.socket] = lambda now: self._look(watcher, now)
            self._poller.register(watcher.socket, zmq.POLLIN)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise EndpointError(f"endpoint {endpoint!r} cannot be connected to: {error}") from None
        self._poller.register(socket, zmq.POLLIN)
        self._next_timer = float("-inf")
        return socket

    def receive(self, timeout: float) -> list[Input]:
        """Wait up to ``timeout`` seconds for inputs of any link. Inputs of one link keep their order.

        Raises:
            HandshakeError: a server refused this process.
        """
        end = self._clock() + timeout
        while True:
            inputs, self._waiting = self._waiting, []
            now = self._clock()
            for _, tap in self._taps:  # only now: the core's outputs go out before their copies
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
        """Send the waiting messages to the recorder. Call this before a long time without :meth:`receive`."""
        for _, tap in self._taps:
            tap.flush(self._clock(), at_once=True)

    def took(self, now: float, inputs: Sequence[Input]) -> None:
        """Offer the inputs of a core's turn at ``now`` (s) to the recorder, if there is one."""
        for _, tap in self._taps:
            tap.took(now, inputs)

    def dropped(self) -> Counter[str]:
        """Counts, by kind, of malformed, refused and unexpected inputs on all links, and of messages not recorded."""
        total = super().dropped() + self._tally.counts
        for _, tap in self._taps:
            total += tap.counts()
        return total

    def close(self, reason: str = "", *, in_order: bool = True) -> None:
        """Say Bye on every welcomed link, close all sockets and remove their files.

        After a crash (``in_order`` False) only recorders and monitors get a Bye.
        """
        for link in self.clients:
            if self.welcome(link) and in_order:
                self._post(link, Bye(reason))
        for watcher in self._watchers:
            watcher.socket.close(linger=0)
        for socket, tap in self._taps:
            tap.leave(reason, self._clock())
            socket.close(linger=_FAREWELL)
        for socket, end in self._ends.items():
            unmet = isinstance(end, ClientLink) and end.session is None
            socket.close(linger=0 if unmet else _FAREWELL)  # do not wait for Hellos that no server answered
        if self._gatekeeper:
            self._gatekeeper.socket.close()
        for path, inode in self._paths.items():  # compare inodes: a new server may have replaced the file
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._context.term()

    def _socket(self, kind: int, endpoint: str, end: ServerLink | ClientLink) -> zmq.Socket[bytes]:
        """A new socket with all its options. libzmq ignores most options after bind or connect."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.MAXMSGSIZE, longest_frame(end))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.IPV6, endpoints.ipv6(endpoint))
        if endpoints.is_tcp(endpoint):  # a TCP peer can vanish without closing its connection
            socket.setsockopt(zmq.HANDSHAKE_IVL, _DEAD)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _DEAD // 5)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _DEAD)
        return socket

    def _timers(self, now: float) -> None:
        """Check keys, failed handshakes, refusals, heartbeats and silent clients at time ``now`` (s)."""
        if self.keys and (change := self.keys.refresh()):
            log.warning("%s", change)
            self._rekey()
        for link in [link for link, due in self._retries.items() if now >= due]:
            del self._retries[link]
            self._reconnect(self._pinned[link])
        for client in self.clients.values():
            client.check()
            self._introduce(client, now)
        for _, tap in self._taps:
            tap.turn(now)
        self._expire(now)

    def _expire(self, now: float) -> None:
        """Forget silent clients, but first read the messages that arrived while this process stood still."""
        if now - self._timed_at > HEARTBEAT_PERIOD:  # this process stood still, and perhaps libzmq's threads too
            self._behind.clear()
            self._awake_since = now
        self._timed_at = now
        for link, server in self.servers.items():
            unread = self._has_more(self._sockets[link])
            since = self._behind.setdefault(link, now) if unread else self._behind.pop(link, now)
            read = not unread and now - self._awake_since >= _ON_THE_WAY
            if read or now - since > PEER_TIMEOUT:
                self._waiting += server.expire(now)

    def _rekey(self) -> None:
        """Drop clients whose key may no longer have their role; reconnect to servers whose key has changed."""
        assert self.keys
        for link in self._guarded:
            server = self.servers[link]
            for key, peer in list(server.peers.items()):
                if not self.keys.may(peer.owner, peer.role):
                    self._waiting += server.forget(key, "its key was revoked")
        for pin in list(self._pinned.values()):
            if self.keys.server(pin.client.link) != pin.key:
                self._reconnect(pin)

    def _reconnect(self, pin: _Pin) -> None:
        """Connect a client again. From now on it expects the new key of its server."""
        assert self.keys
        link = pin.client.link
        with contextlib.suppress(zmq.ZMQError):  # libzmq may have closed the connection already
            pin.socket.disconnect(pin.endpoint)
        curve.as_client(pin.socket, link, self.keys)
        pin.socket.connect(pin.endpoint)
        self._pinned[link] = replace(pin, key=self.keys.server(link))
        if pin.client.state == "welcome":
            pin.client.state = "connecting"

    def _hear_listener(self, socket: zmq.Socket[bytes], tap: Tap, now: float) -> None:
        for _ in range(_DRAIN):
            try:
                self._receiver.finish(socket)
                frames = self._receiver.frames(socket)
            except zmq.Again:
                return
            tap.receive(frames, now)

    def _look(self, watcher: curve.Watcher, now: float) -> None:
        if watcher.failed(now):
            self._retries.setdefault(watcher.link, now + _RETRY)

    def _drain(self, socket: zmq.Socket[bytes]) -> list[Input]:
        """Read the messages of one socket, up to the limits of one turn."""
        now = self._clock()
        if look := self._others.get(socket):
            look(now)
            return []
        inputs: list[Input] = []
        end = self._ends[socket]
        foreign = 0
        for _ in range(_DRAIN):
            before = len(inputs)
            try:
                self._receiver.finish(socket)
                if isinstance(end, ClientLink):
                    inputs += self._from_server(end, self._receiver.frames(socket), now)
                else:
                    inputs += self._from_some_client(socket, end, now)
            except zmq.Again:
                break
            foreign += len(inputs) == before
            if foreign >= FOREIGN:
                break
            # Check first: the exception of an empty socket costs as much as a message.
            if not self._has_more(socket) or self._clock() - now > _TURN:
                break
        return inputs

    @staticmethod
    def _has_more(socket: zmq.Socket[bytes]) -> bool:
        """Whether a message can be read now."""
        return bool(int(socket.get(_EVENTS)) & _READABLE)

    def _from_some_client(self, socket: zmq.Socket[bytes], server: ServerLink, now: float) -> list[Input]:
        """Take the next message from a ROUTER.

        Raises:
            zmq.Again: there is no message.
        """
        if server.link not in self._guarded:
            return self._from_client(server, socket.recv(_NOW), self._receiver.frames(socket), now)
        # Take the key from the message, because a client can choose any routing identity.
        first = socket.recv(_NOW, copy=False)
        frames, owner = self._receiver.frames(socket), curve.owner(first)
        if not (self.keys and self.keys.client(owner)):
            self._tally.note("revoked", f"link {server.link}: a message under the key {owner}", now)
            return []
        return self._from_client(server, first.bytes, frames, now, owner)

    def _forget_unreachable(self) -> list[Input]:
        """Forget clients that have closed, once the server has read their last messages."""
        inputs: list[Input] = []
        for link, key in sorted(self._unreachable):
            if not self._has_more(self._sockets[link]):
                self._unreachable.remove((link, key))
                inputs += self.servers[link].forget(key, "connection closed")
        return inputs

    def _post(self, link: str, message: Message, key: bytes | None = None) -> bool:
        payload = codec.encode(message)
        head = [message.NAME.encode()] if key is None else [key, message.NAME.encode()]
        try:
            sent = self._write(self._sockets[link], [*head, payload])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise ClientGoneError from None
        if sent:
            for _, tap in self._taps:
                tap.offer(link, message, payload)
        return sent

    def _offer(self, message: Message) -> None:
        payload = codec.encode(message) if self._taps else b""
        for _, tap in self._taps:
            tap.offer(RECORDER, message, payload)

    @staticmethod
    def _write(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        """Like ``send_multipart``, without its checks in Python; False if the queue is full.

        If libzmq accepts the first frame, it accepts the others too.
        """
        *head, last = frames
        try:
            for frame in head:
                socket.send(frame, _MORE)
            socket.send(last, _NOW, copy=len(last) < _COPIED)
        except zmq.Again:
            return False
        return True
