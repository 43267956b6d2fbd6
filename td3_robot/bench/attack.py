"""What strangers do to a port, as a process: for ``bench link --attack`` and for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import zmq

KINDS = ("half-open", "garbage", "wrong-key", "oversize")
"""Connections that say nothing; that say what is not ZeroMQ; whose key is not allowed; that announce huge frames."""
_PAUSE = 0.001  # s between two attempts: one attacker, not a denial of the machine's own processor
_OPEN = 200  # connections held at a time


@contextlib.contextmanager
def running(kind: str, endpoint: str, server_key: str) -> Iterator[None]:
    """Attack an endpoint from another process until the block is left."""
    command = [sys.executable, "-m", "td3_robot.bench.attack", kind, endpoint, server_key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        process.stdout.readline()  # it has begun
        yield
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def main(arguments: list[str]) -> None:
    kind, endpoint, server_key = arguments
    attempts = _strangers(endpoint, server_key) if kind in ("wrong-key", "oversize") else _sockets(kind, endpoint)
    for number, _ in enumerate(attempts):
        if number == 0:
            print("begun", flush=True)
        time.sleep(_PAUSE)


def _sockets(kind: str, endpoint: str) -> Iterator[None]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    held: list[socket.socket] = []
    # The first bytes of a ZMTP 3 greeting, then nothing; or what a scanner of ports sends.
    words = b"\xff" + bytes(8) + b"\x7f\x03" if kind == "half-open" else b"GET / HTTP/1.1\r\n\r\n" + os.urandom(2000)
    while True:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection((host, int(port)), 1.0))
            held[-1].sendall(words)
        if len(held) > _OPEN:
            held.pop(0).close()
        yield


def _strangers(endpoint: str, server_key: str) -> Iterator[None]:
    context = zmq.Context()
    held: list[zmq.Socket[bytes]] = []
    while True:
        public, secret = zmq.curve_keypair()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        dealer.curve_serverkey = server_key.encode()
        dealer.connect(endpoint)
        dealer.send_multipart([b"step", bytes(1 << 23)], zmq.DONTWAIT, copy=False)
        held.append(dealer)
        if len(held) > _OPEN // 10:
            held.pop(0).close()
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
