"""How close to a bare echo a policy server in Python can get: one that checks nothing, beside ours and the echo.

    python benchmarks/link_floor.py [--transport ipc|tcp] [--trips 8000] [--json]

The floor has no session, watchdog, lifecycle or counters, validates nothing, and waits in libzmq's own receive. It only
unpacks the Step, computes the actor and the safety filter, and packs the Action.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import zmq

from td3_robot.bench import example, harness
from td3_robot.bench.link import Link, in_turns, p50_ratio
from td3_robot.bench.peers import started
from td3_robot.policy.actor import Actor
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.runtime.realtime import RealtimeConfig
from td3_robot.safety.limits import joined
from td3_robot.transport import codec


def serve(endpoint: str) -> None:
    """Serve the floor; never returns."""
    bundle = example.bundle()
    actor = Actor(bundle)
    guard = SafetyFilter(joined(example.SAFETY, bundle.safety, bundle.spec), bundle.spec)
    unpack, pack = msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            key, _, payload = router.recv_multipart()
            step = unpack(payload)
            observation = np.frombuffer(step["observation"], np.float32)[None]
            applied = np.frombuffer(step["action"], np.float32)[None]
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
def floor(endpoint: str) -> Iterator[Callable[[], int]]:
    """Start the floor; yields a function that makes one round trip and returns its time in ns."""
    rng = np.random.default_rng(0)
    steps = [example.step(sequence, 1, rng) for sequence in range(1000)]
    unpack = msgspec.msgpack.Decoder().decode
    sent = 0
    command = [sys.executable, __file__, "--serve", endpoint]
    with started("floor", command) as (_, bound), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(bound)

        def trip() -> int:
            nonlocal sent
            sent += 1
            begin = time.perf_counter_ns()
            socket.send_multipart([b"step", codec.encode(steps[sent % len(steps)])])
            np.frombuffer(unpack(socket.recv_multipart()[1])["action"], np.float32)
            return time.perf_counter_ns() - begin

        yield trip


def main() -> int:
    parser = harness.Options("python benchmarks/link_floor.py", "Measure a policy server that checks nothing.")
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc", help="(default: %(default)s)")
    parser.number("--trips", 8000, "N", "round trips of each kind")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse(None)
    if options.serve:
        serve(options.serve)
    report: harness.Report = {"machine": harness.describe("td3-robot", "numpy", "pyzmq")}
    report["transport"] = options.transport
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as name, contextlib.ExitStack() as stack:
        link = Link(options.transport, Path(name), RealtimeConfig())
        trips = {
            "echo": stack.enter_context(link.echo(1)).round_trip,
            "floor": stack.enter_context(floor(link.endpoint("floor"))),
            "td3-robot": stack.enter_context(link.robot(stack.enter_context(link.policy()), 1)).round_trip,
        }
        taken = in_turns(trips, options.trips)
    for kind, blocks in taken.items():
        report[kind] = {**harness.percentiles(blocks), "p50_over_echo": p50_ratio(blocks, taken["echo"])}
    return harness.show(report, options.json, _lines)


def _lines(report: harness.Report) -> Iterator[str]:
    yield f"over {report['transport']}"
    yield harness.PERCENTILES
    for kind in ("echo", "floor", "td3-robot"):
        yield harness.percentile_row(kind, report[kind]) + f"   {report[kind]['p50_over_echo']} × echo"


if __name__ == "__main__":
    sys.exit(main())
