"""CURVE on sockets: options, access control (ZAP, ZeroMQ RFC 27), and reconnects after libzmq gives up.

A server accepts a client only in two cases: the client has the key of the server's machine, or the server's allow-list
gives the client's key a role for clients. A client accepts only the server whose key it has pinned. A change of the
list takes effect while nodes run. The ZAP handler runs in the loop of the bus, because a separate thread would compete
with the control loop.
"""

from __future__ import annotations

import contextlib

import zmq
from zmq.utils import monitor, z85

from td3_robot.transport.keys import AllowList
from td3_robot.transport.link import ClientLink
from td3_robot.transport.tally import Tally

_ADDRESS = "inproc://zeromq.zap.01"
_BURST = 2  # maximum number of handshakes to answer in one turn, so that a flood of strangers does not delay robots
_RETRY = 1.0  # seconds until a client connects again, if libzmq does not
_FAILED_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_PROTOCOL_ERROR = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def failed_handshake(*, keys: bool) -> int:
    """libzmq's events for a connection whose handshake failed.

    With keys, the result lacks the event for protocol errors. libzmq 4.3.5 also sends this event for a message that it
    cannot decrypt. If a monitor asks for the event, libzmq then neither closes the connection nor reads from it again.
    """
    return _FAILED_HANDSHAKE if keys else _FAILED_HANDSHAKE | _PROTOCOL_ERROR


def as_server(socket: zmq.Socket[bytes], link: str, keys: AllowList) -> None:
    """Set up a server's socket before it binds."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.identity.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, link.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it, libzmq accepts every client if no handler runs


def owner(frame: zmq.Frame) -> str:
    """The public key of the client that sent a frame; empty without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Gatekeeper:
    """Answers libzmq's ZAP requests. A request asks whether a client that has proved its key may connect."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: AllowList, tally: Tally) -> None:
        self._keys = keys
        self._tally = tally
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def read(self, now: float) -> None:
        """Answer a limited number of waiting requests. ``now`` is the current time (s)."""
        for _ in range(_BURST):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.socket.send_multipart(self._judge(frames, now))

    def _judge(self, frames: list[bytes], now: float) -> list[bytes]:
        version, request, domain, address, _, mechanism, *credentials = frames
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        if self._keys.client(key):
            return [version, request, b"200", b"OK", key.encode(), b""]
        command = f"to allow it: td3-robot keys allow NAME '{key}' --keys {self._keys.folder.path}"
        self._tally.note("denied", f"link {domain.decode()}: {address.decode()} holds an unknown key; {command}", now)
        return [version, request, b"400", b"key not allowed", b"", b""]


class Dialled:
    """A client's TCP connection. With keys, the client has pinned the key of its server.

    The client connects again in two cases:

    - A connection has ended, and libzmq does not connect again. It gives up after a refusal, and after bytes that it
      cannot decrypt or decode.
    - A changed allow-list requires another server key.
    """

    def __init__(self, socket: zmq.Socket[bytes], client: ClientLink, keys: AllowList | None, tally: Tally) -> None:
        self.client = client
        self._socket, self._keys, self._tally = socket, keys, tally
        self._retry = float("inf")  # time (s) of the next attempt to connect; infinite if no attempt is planned
        self._explained = False  # true if the next end is no failed handshake, or has its log line
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        events |= zmq.EVENT_HANDSHAKE_FAILED_AUTH if keys else _PROTOCOL_ERROR
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._set_keys()

    def read(self, now: float) -> None:
        """Log failed handshakes, and plan the next attempt. ``now`` is the current time (s)."""
        while self.monitor.poll(0):
            event = monitor.recv_monitor_message(self.monitor)["event"]
            if event in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_HANDSHAKE_SUCCEEDED):  # libzmq connects again by itself
                self._retry = float("inf")
                self._explained = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                continue
            self._retry = min(self._retry, now + _RETRY)
            if not self._explained:
                self._note_failed_handshake(event, now)
            self._explained = event != zmq.EVENT_DISCONNECTED

    def _note_failed_handshake(self, event: int, now: float) -> None:
        link, endpoint = self.client.link, self.client.endpoint
        if self._keys is None:
            if event == _PROTOCOL_ERROR:
                keys = "set endpoints.keys, or --keys, to this machine's key folder"
                text = f"link {link}: the server at {endpoint} requires keys ({keys}), or is not td3-robot"
                self._tally.note("no-keys", text, now)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            own = f"td3-robot keys allow {self._keys.identity.name} '{self._keys.identity.public}'"
            text = f"link {link}: the server does not allow this machine's key; on the server's machine, run: {own}"
            self._tally.note("not-allowed", text, now)
        else:  # a server with another key cannot decrypt the client's first message, so it closes the connection
            reasons = "nothing serves behind a tunnel, the server uses no keys, or the server does not hold the key"
            text = f"link {link}: the connection to {endpoint} ended during the handshake: {reasons} "
            text += f"{self._keys.server(link)}, which this machine expects; compare it with the output of "
            text += "'td3-robot keys list' on the server's machine"
            self._tally.note("no-handshake", text, now)

    def turn(self, now: float) -> None:
        """Connect again if an attempt is due, or if a changed allow-list requires another server key."""
        if now < self._retry and self._wanted_key() == self._key:
            return
        self._retry = float("inf")
        with contextlib.suppress(zmq.ZMQError):  # libzmq may have closed the connection already
            self._socket.disconnect(self.client.endpoint)
        self._set_keys()
        self._socket.connect(self.client.endpoint)
        if self.client.state == "welcome":
            self.client.state = "connecting"

    def moved(self) -> None:
        """Forget failed handshakes at an earlier endpoint."""
        self._retry = float("inf")

    def _wanted_key(self) -> str | None:
        return self._keys.server(self.client.link) if self._keys else None

    def _set_keys(self) -> None:
        self._key = self._wanted_key()
        if self._keys and self._key:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.identity.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.identity.secret.encode())
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.encode())
