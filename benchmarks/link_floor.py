"""Compare the round trips of three servers in Python: a bare echo, a minimal server ("floor"), and td3-robot's server.

    python benchmarks/link_floor.py [--transport ipc|tcp] [--robots 1 8 64] [--spin 2000] [--trips 8000] [--json]

The echo is a bare ROUTER socket that returns as many bytes as an Action contains. The floor only unpacks the Step,
computes the actor and the safety filter, and packs the Action. It has no session, watchdog, lifecycle or counters, and
it does not validate messages. It waits in libzmq's receive function, and does not spin.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from td3_robot.bench import example, harness
from td3_robot.bench.link import Link
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.messages import Action, Step
from td3_robot.policy.actor import Actor
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.safety.limits import joined
from td3_robot.transport import codec

_BLOCK = 200  # round trips to one server before the next server takes its turn
_UNPACK = msgspec.msgpack.Decoder().decode


def serve_echo(bound: Connection, endpoint: str) -> None:
    """Run the echo server. This function never returns."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        bound.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        while True:
            key, topic, payload = router.recv_multipart()
            router.send_multipart([key, topic, payload[: int.from_bytes(payload[:4], "little")]])


def serve_floor(bound: Connection, endpoint: str) -> None:
    """Run the minimal server ("floor"). This function never returns."""
    bundle = example.bundle()
    actor = Actor(bundle)
    guard = SafetyFilter(joined(example.SAFETY, bundle.safety, bundle.spec), bundle.spec)
    unpack, pack = msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        bound.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        while True:
            key, _, payload = router.recv_multipart()
            step = unpack(payload)
            observation = np.frombuffer(step["observation"], np.float32).reshape(-1, example.OBSERVATIONS)
            applied = np.frombuffer(step["action"], np.float32).reshape(-1, example.ACTIONS)
            action = {
                "source": step["source"],
                "incarnation": step["incarnation"],
                "answers": step["sequence"],
                "stamp": step["stamp"],
                "action": guard(actor(observation), applied).tobytes(),
                "weights_version": 1,
                "noise_kind": 0,
                "noise_seed": 0,
            }
            router.send_multipart([key, b"action", pack(action)])


@contextlib.contextmanager
def connected(serve: Callable[[Connection, str], None], endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """Start a server process, and yield a socket that is connected to it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs, endpoint), daemon=True)
    server.start()
    theirs.close()  # otherwise recv() would never end if the server died
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(ours.recv())
            yield dealer
    finally:
        server.terminate()


def echo_trip(dealer: zmq.Socket[bytes], robots: int) -> int:
    """Send the bytes of a Step, and receive as many bytes as an Action contains. Return the time in ns.

    The first four bytes tell the echo how many bytes to return.
    """
    step, action = _messages(robots)
    frames = [b"step", len(action).to_bytes(4, "little") + codec.encode(step)[4:]]
    begin = time.perf_counter_ns()
    dealer.send_multipart(frames)
    dealer.recv_multipart()
    return time.perf_counter_ns() - begin


def floor_trip(dealer: zmq.Socket[bytes], robots: int) -> int:
    """Make one round trip to the floor, with encoding and decoding; return the time in ns."""
    step, _ = _messages(robots)
    begin = time.perf_counter_ns()
    dealer.send_multipart([b"step", codec.encode(step)])
    np.frombuffer(_UNPACK(dealer.recv_multipart()[1])["action"], np.float32)
    return time.perf_counter_ns() - begin


@cache
def _messages(robots: int) -> tuple[Step, bytes]:
    """Return a Step of this many robots, and the bytes of an Action for it."""
    zeros = np.zeros((robots, example.ACTIONS), np.float32)
    action = Action(example.SOURCE, 0, 500, 500, zeros, 1, 1, 0)
    return example.step(500, robots, np.random.default_rng(0)), codec.encode(action)


def main() -> int:
    parser = harness.Options("python benchmarks/link_floor.py", "Compare the policy server with two simpler servers.")
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc", help="(default: %(default)s)")
    parser.number("--robots", [1], "N", "numbers of robots")
    parser.number("--trips", 8000, "N", "round trips to each server")
    parser.number("--spin", 0, "US", "realtime.spin_us of td3-robot's policy server", low=0)
    options = parser.parse_args()
    report: harness.Report = {"machine": harness.describe("td3-robot", "numpy", "pyzmq")}
    report |= {"transport": options.transport, "robots": {}}
    for robots in options.robots:
        with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder:
            link = Link(options.transport, Path(folder), RealtimeConfig(spin_us=options.spin))
            report["robots"][str(robots)] = measure(link, robots, options.trips)
    return harness.show(report, options.json, _lines)


def measure(link: Link, robots: int, trips: int) -> dict[str, Any]:
    """Measure round trips to each server; return percentiles.

    In each round, the function divides the median time of a server by that of the echo. ``p50_over_echo`` is the median
    of these ratios.
    """
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        kinds = {
            "echo": partial(echo_trip, enter(connected(serve_echo, link.endpoint("echo"))), robots),
            "floor": partial(floor_trip, enter(connected(serve_floor, link.endpoint("floor"))), robots),
            "td3-robot": enter(link.robot(enter(link.policy()), robots)).round_trip,
        }
        turns = {kind: partial(block, trip) for kind, trip in kinds.items()}
        taken = harness.take_turns(turns, -(-trips // _BLOCK), warm_up=True)
    medians = {kind: [statistics.median(times) for times in blocks] for kind, blocks in taken.items()}
    return {
        kind: harness.percentiles(blocks) | {"p50_over_echo": round(harness.ratio(medians[kind], medians["echo"]), 2)}
        for kind, blocks in taken.items()
    }


def block(trip: Callable[[], int]) -> list[int]:
    return [trip() for _ in range(_BLOCK)]


def _lines(report: harness.Report) -> Iterator[str]:
    yield f"over {report['transport']}"
    yield harness.PERCENTILES
    for robots, rows in report["robots"].items():
        for kind, row in rows.items():
            yield harness.percentile_row(f"{robots:>2} robots, {kind}", row) + f"   {row['p50_over_echo']} × echo"


if __name__ == "__main__":
    harness.run_script(main)
