"""CURVE on sockets: options, who may connect (ZAP, ZeroMQ RFC 27), and why a handshake failed.

A server accepts only clients whose key is on its allow-list. A client accepts only the server whose key it has pinned.
Changes of the list take effect while nodes run. The ZAP handler runs in the bus's loop: a thread of its own would
compete with the control loop.
"""

from __future__ import annotations

import zmq
from zmq.utils import monitor, z85

from td3_robot.transport.keys import AllowList
from td3_robot.transport.link import Tally

_ADDRESS = "inproc://zeromq.zap.01"
_BURST = 2  # handshakes to answer in one turn: a flood of strangers must not delay robots
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def as_server(socket: zmq.Socket[bytes], link: str, keys: AllowList) -> None:
    """Set up a server's socket before it binds. While no handler runs, the socket accepts no client."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.identity.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, link.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it libzmq accepts every client while no handler runs


def as_client(socket: zmq.Socket[bytes], link: str, keys: AllowList) -> None:
    """Set up a client's socket before it connects."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.identity.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.identity.secret.encode())
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server(link).encode())


def owner(frame: zmq.Frame) -> str:
    """The public key of the client that sent a frame; empty without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Gatekeeper:
    """Answers libzmq's ZAP requests, which ask whether a client with a proved key may connect."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: AllowList, tally: Tally) -> None:
        self._keys = keys
        self._tally = tally
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self, now: float) -> None:
        """Answer a limited number of waiting requests; never waits."""
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
        command = f"td3-robot keys allow NAME '{key}' --keys {self._keys.folder.path}"
        self._tally.note("denied", f"link {domain.decode()}: {address.decode()} holds an unknown key; {command}", now)
        return [version, request, b"400", b"key not allowed", b"", b""]


class Watcher:
    """Notices failed handshakes of a client; libzmq reports them only on its monitor socket."""

    def __init__(self, socket: zmq.Socket[bytes], link: str, keys: AllowList, tally: Tally) -> None:
        self.link, self._keys, self._tally = link, keys, tally
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(_FAILED)

    def failed(self, now: float) -> bool:
        """Whether a handshake has failed since the last call; logs why."""
        failed = False
        while self.socket.poll(0):
            failed = True
            event = monitor.recv_monitor_message(self.socket)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                own = f"td3-robot keys allow {self._keys.identity.name} '{self._keys.identity.public}'"
                text = f"link {self.link}: the server does not allow our key; there: {own}"
                self._tally.note("not-allowed", text, now)
            else:
                pin = f"td3-robot keys allow NAME FILE --server {self.link} --keys {self._keys.folder.path}"
                text = f"link {self.link}: the server does not hold the key {self._keys.server(self.link)}; {pin}"
                self._tally.note("not-the-server", text, now)
        return failed
