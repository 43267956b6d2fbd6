"""Measure a robot's round trips during an attack on the policy server's port.

    python benchmarks/link_attack.py [--trips 5000] [--json]

The attacker has no allowed key, or has an allowed key and sends invalid data. Robot and server communicate over TCP
with keys. Attacker, server and robot share one machine, so the attacker's use of the processor also delays the round
trips.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from td3_robot.bench import harness
from td3_robot.bench.link import Link
from td3_robot.bench.peers import Robot
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.errors import NodeError
from td3_robot.messages import MAX_COMMAND
from td3_robot.transport.keys import KeyFolder

KINDS = {
    "half-open": "every ms, a new connection sends a part of ZeroMQ's greeting; 200 connections stay open",
    "garbage": "every ms, a new connection sends bytes of another protocol; 200 connections stay open",
    "wrong-key": "every ms, a new client uses a key that is not allowed; 20 clients stay open",
    "oversize": "every ms, a new client with an allowed key sends a frame of 8 MB; 20 clients stay open",
    "large": "a client with an allowed key sends no Hello, but a command of 4 MB every 20 ms",
    "frames": "a client with an allowed key sends a message of 2,000 empty frames every 20 ms",
    "flood": "a client with an allowed key sends 20 random messages every ms",
}
_BLOCK = 200  # round trips in one turn
_PAUSE = 0.001  # seconds between two attempts: an attempt opens a connection or sends messages
_CONNECTIONS = 200  # open at the same time
_CLIENTS = 20  # open at the same time
_FLOOD = 20  # messages in one attempt of the kind "flood"
_RARE = 20  # the kinds "large" and "frames" send a message only in every 20th attempt


@contextlib.contextmanager
def running(kind: str, endpoint: str, keys: str) -> Iterator[None]:
    """Attack an endpoint from another process during the ``with`` block.

    Args:
        kind: a key of :data:`KINDS`.
        endpoint: endpoint to attack.
        keys: folder with the server's keys.
    """
    command = [sys.executable, __file__, kind, endpoint, keys]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        if not process.stdout.readline():  # wait until the attack has its full strength
            raise NodeError(f"the attacker {kind!r} has ended")
        yield
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def attack(arguments: list[str]) -> None:
    kind, endpoint, keys = arguments
    attempts = {
        "half-open": lambda: _connections(endpoint, b"\xff" + bytes(8) + b"\x7f\x03"),
        "garbage": lambda: _connections(endpoint, b"GET / HTTP/1.1\r\n\r\n" + os.urandom(2000)),
        "wrong-key": lambda: _clients(endpoint, keys, None),
        "oversize": lambda: _clients(endpoint, keys, [b"step", bytes(1 << 23)]),
        "large": lambda: _messages(endpoint, keys, 1, _RARE, lambda: [b"command", bytes(MAX_COMMAND)]),
        "frames": lambda: _messages(endpoint, keys, 1, _RARE, lambda: [b""] * 2000),
        "flood": lambda: _messages(endpoint, keys, _FLOOD, 1, lambda: [b"step", os.urandom(400)]),
    }[kind]()
    for number, _ in enumerate(attempts):
        if number == _CONNECTIONS:  # the attack has its full strength
            print("begun", flush=True)
        time.sleep(_PAUSE)


def _connections(endpoint: str, words: bytes) -> Iterator[None]:
    """Open TCP connections, and send ``words`` over each of them."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    opened: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            opened.append(socket.create_connection((host, int(port)), 1.0))
            opened[-1].sendall(words)
        if len(opened) > _CONNECTIONS:
            opened.pop(0).close()
        yield


def _clients(endpoint: str, keys: str, message: list[bytes] | None) -> Iterator[None]:
    """Open clients.

    If ``message`` is None, the clients have a wrong key. Otherwise they have an allowed key and send ``message``.
    """
    context = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []
    while True:
        opened.append(_dealer(context, endpoint, keys, allowed=message is not None))
        if message:
            opened[-1].send_multipart(message, copy=False)
        if len(opened) > _CLIENTS:
            opened.pop(0).close()
        yield


def _messages(endpoint: str, keys: str, count: int, turns: int, make: Callable[[], list[bytes]]) -> Iterator[None]:
    """Send ``count`` messages in every ``turns``-th attempt, from one client with an allowed key."""
    dealer = _dealer(zmq.Context(), endpoint, keys, allowed=True)
    while True:
        for _ in range(count):
            with contextlib.suppress(zmq.Again):  # the queue is full
                dealer.send_multipart(make(), zmq.DONTWAIT)
        for _ in range(turns):
            yield


def _dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: str, *, allowed: bool) -> zmq.Socket[bytes]:
    identity = KeyFolder(Path(keys)).identity()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, _CONNECTIONS)  # limits this process's memory
    dealer.curve_serverkey = identity.public.encode()
    pair = (identity.public.encode(), identity.secret.encode()) if allowed else zmq.curve_keypair()
    dealer.curve_publickey, dealer.curve_secretkey = pair
    dealer.connect(endpoint)
    return dealer


def main() -> int:
    parser = harness.Options("python benchmarks/link_attack.py", "Measure round trips without and with attacks.")
    parser.number("--trips", 5000, "N", "for each attack, N round trips with the attack and N without it", low=_BLOCK)
    options = parser.parse_args()
    report: harness.Report = {"machine": harness.describe("td3-robot", "numpy", "pyzmq"), "attacks": {}}
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder, contextlib.ExitStack() as stack:
        KeyFolder(Path(folder) / "keys").create("bench")
        link = Link("curve", Path(folder), RealtimeConfig())
        served = stack.enter_context(link.policy())
        robot = stack.enter_context(link.robot(served, 1))
        for kind in KINDS:
            report["attacks"][kind] = measure(robot, options.trips, kind, served, str(link.keys))
    return harness.show(report, options.json, _lines)


def measure(robot: Robot, trips: int, kind: str, endpoint: str, keys: str) -> dict[str, Any]:
    """Measure round trips alternately without and with an attack.

    ``p50_over_quiet`` is the median during the attack, divided by the median without an attack. ``p99_over_quiet`` is
    the same ratio of the 99th percentiles.
    """

    def block() -> list[int]:
        return [robot.round_trip() for _ in range(_BLOCK)]

    def settled() -> list[int]:
        block()  # not measured: the server may still be closing connections of an earlier attack
        return block()

    def attacked() -> list[int]:
        with running(kind, endpoint, keys):
            return settled()

    blocks = harness.take_turns({"quiet": settled, "attacked": attacked}, -(-trips // _BLOCK), warm_up=True)
    figures = {name: harness.percentiles(times) for name, times in blocks.items()}
    ratios = {
        f"{part}_over_quiet": round(figures["attacked"][part] / figures["quiet"][part], 2) for part in ("p50", "p99")
    }
    return {"attack": KINDS[kind], **figures, **ratios}


def _lines(report: harness.Report) -> Iterator[str]:
    yield harness.PERCENTILES
    for kind, row in report["attacks"].items():
        yield harness.percentile_row(f"{kind}, quiet", row["quiet"])
        yield harness.percentile_row(f"{kind}, attacked", row["attacked"]) + f"   p99 × {row['p99_over_quiet']}"


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        attack(sys.argv[1:])
    harness.run_script(main)
