"""ZeroMQ under the sessions: sockets, their options, polling. One bus a process, used from one thread."""

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

from td3_robot.core_types import Input, Origin, Peer
from td3_robot.errors import EndpointError
from td3_robot.messages import Bye, Message, Step
from td3_robot.specs import RobotSpec
from td3_robot.topics import QUEUE_LENGTH, RECORDER
from td3_robot.transport import codec, curve, endpoints
from td3_robot.transport.frames import Receiver, longest_frame
from td3_robot.transport.keys import REVOCATION_TIME, AllowList
from td3_robot.transport.link import HEARTBEAT_PERIOD, PEER_TIMEOUT, ClientLink, ServerLink, Tally
from td3_robot.transport.tap import Tap

log = logging.getLogger(__name__)

_IO_THREADS = 2  # connections are spread over them: megabytes that a stranger has decrypted hold up half the others
_FAREWELL = 1000  # ms that the last words may take; they do where a peer stands still or the machine is busy
_DRAIN = 256  # messages taken from one socket before the others get their turn
FOREIGN = 16
"""Messages taken from one socket before the others get their turn that are nothing to the core: of strangers,
malformed, part of a handshake. So a flood of them costs the core's next turn little, whatever it is made of."""
_TURN = 0.001  # seconds of taking messages from one socket: a peer that floods us must not starve the others
_TIMER = REVOCATION_TIME  # seconds: the longest sleep before handshakes, time-outs and keys are looked at
_ON_THE_WAY = 0.5  # seconds that libzmq has for what came while this process stood still
_RETRY = 1.0  # seconds until a client whose handshake failed tries again; libzmq gives up at a "no"
_DEAD = 5_000  # ms without a sign of life after which a TCP connection is closed, and made anew by its client
_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)  # plain numbers: flags of an enum take longer
_READABLE, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
_COPIED = 65536  # bytes above which a frame is sent without copying it
MAX_FRAME = codec.MAX_BYTES + 1024
"""Bytes of a frame, beyond which libzmq closes the connection that sends it; a link that takes only shorter messages
cuts off earlier."""


@dataclass(frozen=True, eq=False)
class _Pin:
    """A client's link with keys: where its server is, and the key expected of it."""

    endpoint: str
    key: str
    socket: zmq.Socket[bytes]
    session: ClientLink


class Bus:
    """All links of one process.

    Not thread-safe, as ZeroMQ's sockets are not. ``clock`` is a monotonic clock in seconds. With ``keys`` every TCP
    link uses CURVE; set them before the first link.

    Attributes:
        spin: seconds after an input for which waiting for the next one keeps the processor instead of going to sleep,
            out of which a core takes long to wake up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, keys: AllowList | None = None) -> None:
        self.keys = keys
        self.spin = 0.0
        self._context = zmq.Context(io_threads=_IO_THREADS)
        self._clock = clock
        self._poller = zmq.Poller()
        self._servers: dict[str, tuple[zmq.Socket[bytes], ServerLink]] = {}
        self._clients: dict[str, tuple[zmq.Socket[bytes], ClientLink]] = {}
        self._sessions: dict[zmq.Socket[bytes], ServerLink | ClientLink] = {}
        self._others: dict[zmq.Socket[bytes], Callable[[float], None]] = {}  # told the time when they have something
        self._guarded: set[str] = set()  # links served with keys
        self._pinned: dict[str, _Pin] = {}  # of each link with keys
        self._gatekeeper: curve.Gatekeeper | None = None
        self._watchers: list[curve.Watcher] = []
        self._retries: dict[str, float] = {}  # links to be connected anew, and when
        self._tally = Tally()
        self._receiver = Receiver(_TURN, clock)
        self._taps: list[tuple[zmq.Socket[bytes], Tap]] = []
        self._paths: dict[Path, int] = {}  # files of the sockets that we serve, with their inodes
        self._waiting: list[Input] = []
        self._unreachable: set[tuple[str, bytes]] = set()  # clients, by link and key, that have closed
        self._behind: dict[str, float] = {}  # links served of which not all was read, and since when
        self._next_timer = self._timed_at = self._awake_since = float("-inf")
        self._awake_until = float("-inf")

    def serve(self, endpoint: str, session: ServerLink) -> str:
        """Bind a server; returns the endpoint really bound (``tcp://HOST:*`` takes a free port).

        Raises:
            EndpointError: busy, malformed or not allowed.
        """
        endpoints.check(endpoint, bind=True, keys=self.keys is not None)
        socket = self._socket(zmq.ROUTER, endpoint, session)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells a full queue from a client that is gone
        if self.keys and endpoints.is_tcp(endpoint):
            if self._gatekeeper is None:
                self._gatekeeper = curve.Gatekeeper(self._context, self.keys, self._tally)
                self._others[self._gatekeeper.socket] = self._gatekeeper.answer
                self._poller.register(self._gatekeeper.socket, zmq.POLLIN)
            curve.as_server(socket, session.link, self.keys)
            session.may = self.keys.may
            self._guarded.add(session.link)
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
        self._servers[session.link] = (socket, session)
        self._sessions[socket] = session
        self._poller.register(socket, zmq.POLLIN)
        return bound

    def connect(self, endpoint: str, session: ClientLink) -> None:
        """Connect a client; the server need not be there yet.

        Raises:
            EndpointError: malformed or not allowed.
        """
        socket = self._connected(endpoint, session)
        self._clients[session.link] = (socket, session)
        self._sessions[socket] = session
        self._introduce(socket, session, self._clock())  # now, so that nothing is sent before it

    def record(self, endpoint: str, session: ClientLink, *, expected: bool = False) -> None:
        """Offer whatever this bus sends to the recorder, or monitor, at an endpoint, see
        :class:`~td3_robot.transport.tap.Tap`.

        Raises:
            EndpointError: malformed or not allowed.
        """
        socket = self._connected(endpoint, session, immediate=True)
        tap = Tap(session, lambda name, payload: self._post(socket, [name.encode(), payload]), expected)
        self._taps.append((socket, tap))
        self._others[socket] = lambda now: self._hear_listener(socket, tap, now)

    def _connected(self, endpoint: str, session: ClientLink, *, immediate: bool = False) -> zmq.Socket[bytes]:
        """A DEALER; an ``immediate`` one takes nothing while there is no connection."""
        endpoints.check(endpoint, bind=False, keys=self.keys is not None)
        socket = self._socket(zmq.DEALER, endpoint, session)
        socket.setsockopt(zmq.IMMEDIATE, immediate)
        if self.keys and endpoints.is_tcp(endpoint):
            curve.as_client(socket, session.link, self.keys)
            self._pinned[session.link] = _Pin(endpoint, self.keys.server(session.link), socket, session)
            watcher = curve.Watcher(socket, session.link, self.keys, self._tally)
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
        """Inputs from all links, in the order each link delivered them; waits up to ``timeout`` seconds for one.

        Raises:
            HandshakeError: a server refused us.
        """
        end = self._clock() + timeout
        while True:
            inputs, self._waiting = self._waiting, []
            now = self._clock()
            for _, tap in self._taps:  # here, where what the core had to say has gone out
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
        """What the poller finds, waiting for something until ``end``; both times in seconds."""
        while now < min(end, self._awake_until):
            if ready := self._poller.poll(0):
                return ready
            os.sched_yield()  # to libzmq's threads, which may have nowhere else to run, and bring what we look for
            now = self._clock()
        return self._poller.poll(math.ceil(max(0.0, end - now) * 1e3))

    def send(self, to: Origin, message: Message) -> bool:
        """Hand a message to its link; False if its queue is full (ask again or count it lost) or the peer is gone."""
        if isinstance(to, Peer):
            socket, server = self._servers[to.link]
            return to.key in server.peers and self._reply(socket, server, to.key, message)
        if to == RECORDER:
            payload = codec.encode(message) if self._taps else b""
            for _, tap in self._taps:
                tap.offer(to, message, payload)
            return True
        socket, client = self._clients[to]
        now = self._clock()
        if client.wake(now):
            self._introduce(socket, client, now)
            if isinstance(message, Step):  # the core may have to tell a server that met us anew of others before it
                return False
        if self._say(socket, to, message):
            client.sent(now)
            return True
        return False

    def flush(self) -> None:
        """Send the recorder what was gathered for it: for a while nobody will look at the links."""
        for _, tap in self._taps:
            tap.flush(self._clock(), at_once=True)

    def took(self, now: float, inputs: Sequence[Input]) -> None:
        """Tell the recorder, if there is one, what a core is told in its turn at ``now`` (s)."""
        for _, tap in self._taps:
            tap.took(now, inputs)

    def welcome(self, link: str) -> bool:
        """Whether the server of a link has welcomed us."""
        return self._clients[link][1].state == "welcome"

    def heard(self, link: str) -> float:
        """When the server of a link has said something last, by the bus's clock (s); never is minus infinity."""
        return self._clients[link][1].heard

    def links(self) -> list[str]:
        """The links that this bus is a client of."""
        return list(self._clients)

    def peers(self, link: str) -> list[Peer]:
        """The clients of a link that this bus serves."""
        return list(self._servers[link][1].peers.values())

    def dropped(self) -> Counter[str]:
        """Malformed, refused and unexpected input by kind, over all links."""
        total = Counter(self._tally.counts)
        for _, session in self._links():
            total += session.tally.counts
        for _, tap in self._taps:
            total += tap.counts()
        return total

    def close(self, reason: str = "", *, in_order: bool = True) -> None:
        """Say Bye on every link that was welcomed, close all sockets and remove their files.

        Not ``in_order``, nobody but who listens is told anything: others must not take it for a decision.
        """
        for link, (socket, session) in self._clients.items():
            if session.state == "welcome" and in_order:
                self._say(socket, link, Bye(reason))
        for watcher in self._watchers:
            watcher.socket.close(linger=0)
        for socket, tap in self._taps:
            tap.leave(reason, self._clock())
            socket.close(linger=_FAREWELL)
        for socket, end in self._links():
            unmet = isinstance(end, ClientLink) and end.session is None
            socket.close(linger=0 if unmet else _FAREWELL)  # Hellos to nobody are not worth waiting for
        if self._gatekeeper:
            self._gatekeeper.socket.close()
        for path, inode in self._paths.items():  # now: once we do not listen any more, a successor may
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._context.term()

    def _links(self) -> list[tuple[zmq.Socket[bytes], ServerLink | ClientLink]]:
        return [*self._servers.values(), *self._clients.values()]

    def _socket(self, kind: int, endpoint: str, session: ServerLink | ClientLink) -> zmq.Socket[bytes]:
        """A socket with every option set that must come before bind or connect (FIELD_NOTES: later ones do nothing)."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        socket.setsockopt(zmq.MAXMSGSIZE, longest_frame(session))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.IPV6, endpoints.ipv6(endpoint))
        if endpoints.is_tcp(endpoint):  # where a peer can vanish without a word
            socket.setsockopt(zmq.HANDSHAKE_IVL, _DEAD)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _DEAD // 5)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _DEAD)
        return socket

    def _timers(self, now: float) -> None:
        if self.keys and (change := self.keys.refresh()):
            log.warning("%s", change)
            self._rekey()
        for link in [link for link, due in self._retries.items() if now >= due]:
            del self._retries[link]
            self._reconnect(self._pinned[link])
        for socket, client in self._clients.values():
            client.check()
            self._introduce(socket, client, now)
        for _, tap in self._taps:
            tap.turn(now)
        if now - self._timed_at > HEARTBEAT_PERIOD:  # we stood still, and perhaps libzmq's threads, too
            self._behind.clear()
            self._awake_since = now
        self._timed_at = now
        for link, (socket, server) in self._servers.items():
            # Who spoke while we stood still is not silent: what is left to be read is looked at first, within limits.
            since = self._behind.setdefault(link, now) if self._has_more(socket) else self._behind.pop(link, now)
            read = link not in self._behind and now - self._awake_since >= _ON_THE_WAY
            if read or now - since > PEER_TIMEOUT:
                self._waiting += server.expire(now)

    def _rekey(self) -> None:
        """Let go of clients that may no longer connect in their role, and of servers that are not expected any more."""
        assert self.keys
        for link in self._guarded:
            session = self._servers[link][1]
            for key, peer in list(session.peers.items()):
                if not self.keys.may(peer.owner, peer.role):
                    self._waiting += session.forget(key, "its key was revoked")
        for pin in list(self._pinned.values()):
            if self.keys.server(pin.session.link) != pin.key:
                self._reconnect(pin)

    def _reconnect(self, pin: _Pin) -> None:
        assert self.keys
        link = pin.session.link
        with contextlib.suppress(zmq.ZMQError):  # libzmq may have given it up already
            pin.socket.disconnect(pin.endpoint)
        curve.as_client(pin.socket, link, self.keys)
        pin.socket.connect(pin.endpoint)
        self._pinned[link] = replace(pin, key=self.keys.server(link))
        if pin.session.state == "welcome":
            pin.session.state = "connecting"

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
        now = self._clock()
        if look := self._others.get(socket):
            look(now)
            return []
        inputs: list[Input] = []
        session = self._sessions[socket]
        foreign = 0
        for _ in range(_DRAIN):
            before = len(inputs)
            try:
                self._receiver.finish(socket)
                if isinstance(session, ClientLink):
                    inputs += session.receive(self._receiver.frames(socket), now)
                    if session.state != "welcome":  # the server may just have asked for our Hello
                        self._introduce(socket, session, now)
                else:
                    inputs += self._from_client(socket, session, now)
            except zmq.Again:
                break
            foreign += len(inputs) == before
            if foreign >= FOREIGN:
                break
            # To ask is cheaper than to try: an exception costs as much as a message.
            if not self._has_more(socket) or self._clock() - now > _TURN:
                break
        return inputs

    @staticmethod
    def _has_more(socket: zmq.Socket[bytes]) -> bool:
        """Whether there is a message to be read now."""
        return bool(int(socket.get(_EVENTS)) & _READABLE)

    def _from_client(self, socket: zmq.Socket[bytes], session: ServerLink, now: float) -> list[Input]:
        owner = ""
        if session.link in self._guarded:
            # Only a message itself says with which key its connection was made: a client can choose the identity.
            first = socket.recv(_NOW, copy=False)
            key, frames = first.bytes, self._receiver.frames(socket)
            owner = curve.owner(first)
            if not (self.keys and self.keys.client(owner)):
                self._tally.note("revoked", f"link {session.link}: a message under the key {owner}", now)
                return []
        else:
            key, frames = socket.recv(_NOW), self._receiver.frames(socket)
        inputs, replies = session.receive(key, frames, now, owner)
        for key, message in replies:
            self._reply(socket, session, key, message)
        return inputs

    def adopt(self, link: str, spec: RobotSpec) -> None:
        """Tell a server which robot it serves, see ``ServerLink.adopt``."""
        socket, session = self._servers[link]
        inputs, replies = session.adopt(spec)
        self._waiting += inputs
        for key, message in replies:
            self._reply(socket, session, key, message)

    def _introduce(self, socket: zmq.Socket[bytes], session: ClientLink, now: float) -> None:
        """Send what the handshake has to send at this time."""
        for message in session.due(now):
            self._say(socket, session.link, message)

    def _reply(self, socket: zmq.Socket[bytes], session: ServerLink, key: bytes, message: Message) -> bool:
        try:
            sent = self._say(socket, session.link, message, key)
            self._unreachable.discard((session.link, key))  # a later process may have chosen the same identity
            return sent
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable.add((session.link, key))
            return False

    def _forget_unreachable(self) -> list[Input]:
        """Let go of clients that have closed, as soon as all has been read that they said before they did."""
        inputs: list[Input] = []
        for link, key in sorted(self._unreachable):
            socket, session = self._servers[link]
            if not self._has_more(socket):
                self._unreachable.remove((link, key))
                inputs += session.forget(key, "connection closed")
        return inputs

    def _say(self, socket: zmq.Socket[bytes], link: str, message: Message, *to: bytes) -> bool:
        payload = codec.encode(message)
        sent = self._post(socket, [*to, message.NAME.encode(), payload])
        if sent:
            for _, tap in self._taps:
                tap.offer(link, message, payload)
        return sent

    @staticmethod
    def _post(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        """As ``send_multipart``, less what it checks and adds up in Python; only the first frame can be refused."""
        *head, last = frames
        try:
            for frame in head:
                socket.send(frame, _MORE)
            socket.send(last, _NOW, copy=len(last) < _COPIED)
        except zmq.Again:
            return False
        return True
