"""How near to a bare echo any policy server in Python can come: one that checks nothing, beside ours and the echo.

    python benchmarks/link_floor.py [--transport ipc|tcp] [--trips 8000] [--json]

The floor has no session, watchdog, lifecycle or counters, asks nothing of what arrives, and waits in libzmq's own
receive: it unpacks the Step, computes the actor and the safety filter, and packs the Action. All three take turns,
block by block; medians of the ratios of adjacent blocks, for one robot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from td3_robot.bench import example
from td3_robot.bench.link import Link, in_turns
from td3_robot.bench.peers import started
from td3_robot.policy.actor import Actor
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.runtime.realtime import RealtimeConfig
from td3_robot.safety.limits import joined
from td3_robot.transport import codec
from td3_robot.util import machine


def serve(endpoint: str) -> None:
    """The floor; never returns."""
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
    """One round trip to the floor, in ns."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc", help="(default: %(default)s)")
    parser.add_argument("--trips", type=int, default=8000, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    computer = machine.describe(("td3-robot", "numpy", "pyzmq"))
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as name, contextlib.ExitStack() as stack:
        link = Link(options.transport, Path(name), RealtimeConfig())
        trips = {
            "echo": stack.enter_context(link.echo(1)).round_trip,
            "floor": stack.enter_context(floor(link.endpoint("floor"))),
            "td3-robot": stack.enter_context(link.robot(stack.enter_context(link.policy()), 1)).round_trip,
        }
        taken = in_turns(trips, options.trips)
    report: dict[str, Any] = {"machine": computer, "transport": options.transport}
    for kind, round_trips in taken.items():
        report[kind] = {**example.spread(round_trips.times), "p50_over_echo": round_trips.ratio}
    if options.json:
        print(json.dumps(report))
        return 0
    print(
        f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before; over {options.transport}"
    )
    print(example.HEAD)
    for kind in taken:
        print(example.row(kind, report[kind]) + f"   {report[kind]['p50_over_echo']} × echo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
