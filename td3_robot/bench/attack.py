"""What strangers, and known machines gone wrong, do to a port, as a process: for ``bench link --attack``."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from td3_robot.messages import MAX_COMMAND
from td3_robot.transport.keys import KeyFolder

KINDS = {
    "half-open": "a new connection every ms that says half a greeting and then nothing; 200 are held",
    "garbage": "a new connection every ms that says what is not ZeroMQ; 200 are held",
    "wrong-key": "a new client every ms whose key is not allowed; 20 are held",
    "oversize": "a new client every ms with an allowed key, which sends a frame of 8 MB; 20 are held",
    "large": "a client with an allowed key that never says hello and sends a command of 4 MB every 20 ms",
    "frames": "a client with an allowed key that sends a message of 2,000 empty frames every 20 ms",
    "flood": "a client with an allowed key that sends 20 messages of nonsense every ms",
}
_PAUSE = 0.001  # s
_HELD = 200
_NONSENSE = 20
_RARE = 20  # turns


@contextlib.contextmanager
def running(kind: str, endpoint: str, keys: str) -> Iterator[None]:
    """Attack an endpoint, whose server's keys are in a folder, from another process until the block is left."""
    command = [sys.executable, "-m", "td3_robot.bench.attack", kind, endpoint, keys]
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
    kind, endpoint, keys = arguments
    attempts = {
        "half-open": lambda: _sockets(endpoint, b"\xff" + bytes(8) + b"\x7f\x03"),
        "garbage": lambda: _sockets(endpoint, b"GET / HTTP/1.1\r\n\r\n" + os.urandom(2000)),
        "wrong-key": lambda: _strangers(endpoint, keys),
        "oversize": lambda: _oversize(endpoint, keys),
        "large": lambda: _rare(endpoint, keys, [b"command", bytes(MAX_COMMAND)]),
        "frames": lambda: _rare(endpoint, keys, [b""] * 2000),
        "flood": lambda: _flood(endpoint, keys),
    }[kind]()
    for number, _ in enumerate(attempts):
        if number == 0:
            print("begun", flush=True)
        time.sleep(_PAUSE)


def _sockets(endpoint: str, words: bytes) -> Iterator[None]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection((host, int(port)), 1.0))
            held[-1].sendall(words)
        if len(held) > _HELD:
            held.pop(0).close()
        yield


def _dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: str, *, known: bool) -> zmq.Socket[bytes]:
    identity = KeyFolder(Path(keys)).identity()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, _HELD)  # messages: what finds no room is not sent, and this process stays small
    dealer.curve_serverkey = identity.public.encode()
    pair = (identity.public.encode(), identity.secret.encode()) if known else zmq.curve_keypair()
    dealer.curve_publickey, dealer.curve_secretkey = pair
    dealer.connect(endpoint)
    return dealer


def _strangers(endpoint: str, keys: str) -> Iterator[None]:
    context = zmq.Context()
    held: list[zmq.Socket[bytes]] = []
    while True:
        held.append(_dealer(context, endpoint, keys, known=False))
        if len(held) > _HELD // 10:
            held.pop(0).close()
        yield


def _oversize(endpoint: str, keys: str) -> Iterator[None]:
    context = zmq.Context()
    held: list[zmq.Socket[bytes]] = []
    while True:
        held.append(_dealer(context, endpoint, keys, known=True))
        held[-1].send_multipart([b"step", bytes(1 << 23)], copy=False)
        if len(held) > _HELD // 10:
            held.pop(0).close()
        yield


def _rare(endpoint: str, keys: str, frames: list[bytes]) -> Iterator[None]:
    dealer = _dealer(zmq.Context(), endpoint, keys, known=True)
    while True:
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart(frames, zmq.DONTWAIT)
        for _ in range(_RARE):
            yield


def _flood(endpoint: str, keys: str) -> Iterator[None]:
    dealer = _dealer(zmq.Context(), endpoint, keys, known=True)
    while True:
        for _ in range(_NONSENSE):
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart([b"step", os.urandom(400)], zmq.DONTWAIT)
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
