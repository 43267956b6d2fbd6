"""The processes of benchmarks/scale.py: a real learner, simulators that replay recorded Steps, and policy servers.

    python benchmarks/scale_nodes.py learner|sources|policies OPTIONS

One process runs all sources, and one process runs all policy servers. Each source and policy server has its own TCP
connection with keys, as on a cluster. At SIGTERM, the process of the sources and the process of the policy servers
print their totals as JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import secrets
import signal
import socket
import statistics
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scale_steps import Replay

from td3_robot.core_types import Input, Output
from td3_robot.messages import Throttle, Weights
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.transport import link as handshake
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ClientLink

_LOOK = 0.01  # with --rate: seconds between two reads of Throttles, and between two tries to send a Step
_BURST = 8  # without --rate: maximum number of Steps that a source sends before the next source has its turn
_TCP_BYTES = struct.Struct("=120xQQ")  # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info


def main() -> int:
    if sys.argv[1] == "learner":
        return _learner(sys.argv[2:])
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("sources", "policies"))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--robots", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="Steps per second of each source; 0 for full speed")
    parser.add_argument("--steps", type=Path, help="file of recorded Steps")
    options = parser.parse_args()
    return _sources(options) if options.what == "sources" else _policies(options)


def _learner(arguments: Sequence[str]) -> int:
    """Run the learner's node. Its Status also counts the turns. A turn is one call of :meth:`LearnerCore.step`."""
    from td3_robot.learner import node as learner_node  # loads torch, which the other processes do not need
    from td3_robot.learner.core import LearnerCore

    step = LearnerCore.step

    def counted(self: LearnerCore, inputs: Sequence[Input], now: float) -> list[Output]:
        self.counters["turns"] += 1
        return step(self, inputs, now)

    LearnerCore.step = counted  # type: ignore[method-assign]
    return learner_node.main(arguments)


class _Clients:
    """Connections of this process to the learner, one for each source or policy server.

    Attributes:
        stopped: whether SIGTERM has come.
    """

    def __init__(self, options: argparse.Namespace, role: str, accepts: Any, **hello: Any) -> None:
        self.stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        run = RunFolder.open(options.run)
        config = run.config()
        self.bus = Bus(keys=open_keys(config.endpoints.keys))
        self.names = {f"learner-{number}": f"{role}-{number}" for number in range(options.count)}
        endpoint = run.endpoint("learner", config)
        self._port = int(endpoint.rpartition(":")[2])
        for link, name in self.names.items():
            greeting = handshake.hello(
                role,
                name,
                client=secrets.randbits(63),
                incarnation=options.incarnation,
                agreement=config.agreement(),
                **hello,
            )
            self.bus.connect(endpoint, ClientLink(link, greeting, accepts))

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def bytes(self) -> tuple[int, int]:
        """Return how many bytes all connections together have sent and received, according to the kernel."""
        sent = received = 0
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port == self._port:
                with socket.socket(fileno=os.dup(connection.fd)) as copy:
                    facts = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES.size)
                acked, taken = _TCP_BYTES.unpack(facts)
                sent, received = sent + acked, received + taken
        return sent, received


def _sources(options: argparse.Namespace) -> int:
    replays = [
        Replay.load(options.steps, f"simulator-{number}", options.robots, options.incarnation)
        for number in range(options.count)
    ]
    clients = _Clients(options, "simulator", (Throttle,), robots=options.robots, spec=replays[0].spec)
    links, allowed = list(clients.names), [0] * options.count
    numbers = {link: number for number, link in enumerate(links)}
    rng = np.random.default_rng(0)
    due = [(time.monotonic() + float(rng.uniform(0, 1 / (options.rate or 1))), n) for n in range(options.count)]
    heapq.heapify(due)
    looked = 0.0

    def send(number: int) -> bool:
        replay = replays[number]
        may = clients.bus.welcome(links[number]) and replay.transitions < allowed[number]
        if may and clients.bus.send(links[number], replay.step):
            replay.advance()
            return True
        return False

    while not clients.stopped:
        now = time.monotonic()
        if options.rate:
            while due[0][0] <= now:
                at, number = due[0]
                sent = send(number)
                heapq.heapreplace(due, (at + 1 / options.rate if sent else now + _LOOK, number))
            if now - looked < _LOOK:
                time.sleep(max(0.0, min(due[0][0] - now, _LOOK)))
                continue
        else:
            for number in range(options.count):
                for _ in range(_BURST):
                    if not send(number):
                        break
        looked = now
        for link, message in clients.bus.receive(0.0 if options.rate else 0.0005):
            if isinstance(message, Throttle) and isinstance(link, str):
                number = numbers[link]
                allowed[number] = max(allowed[number], message.transitions_allowed)
    sent, received = clients.bytes()
    steps = sum(replay.step.sequence for replay in replays)
    print(json.dumps({"steps": steps, "sent": sent, "received": received}), flush=True)
    clients.bus.close()
    return 0


def _policies(options: argparse.Namespace) -> int:
    from td3_robot.policy.store import examine

    clients = _Clients(options, "policy", (Weights,))
    arrivals: dict[int, list[float]] = defaultdict(list)
    processor, count = 0.0, 0
    while not clients.stopped:
        begin = time.process_time()
        inputs = clients.bus.receive(0.05)
        for _, message in inputs:
            if isinstance(message, Weights):
                examine(message.version, message.sha256, message.payload)
                arrivals[message.version].append(time.monotonic())
                count += 1
        processor += (time.process_time() - begin) if inputs else 0.0
    spans = [max(times) - min(times) for times in arrivals.values() if len(times) == options.count]
    print(
        json.dumps(
            {
                "weights": count,
                "received": clients.bytes()[1],
                "cpu_ms": processor / max(count, 1) * 1e3,
                "span_ms": statistics.median(spans) * 1e3 if spans else 0.0,
            }
        ),
        flush=True,
    )
    clients.bus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
