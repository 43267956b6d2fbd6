"""Measure the cost of live weights: how long a robot's round trips take at a fixed rate.

The script measures the round trips with and without new weights.

    python benchmarks/live_weights.py [--hidden 400 300] [--every 0.1] [--rate 500] [--seconds 10] [--json]

The policy server is the real node, as deployed (``td3-robot policy``). The learner is a process that publishes a valid
policy at a fixed interval. Each round measures one second with new weights and one second without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from td3_robot.bench import example, harness
from td3_robot.bench.peers import TIMEOUT, Robot
from td3_robot.bundle import Bundle, sha256
from td3_robot.errors import NodeError
from td3_robot.messages import Weights
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ServerLink

_TURN = 1.0  # seconds of one measurement, with or without new weights
_BOUNDS_MS = (1, 2, 5)  # the report counts the round trips that take longer than each of these times


def learn(publishing: Event, endpoint: str, bundle: Bundle, every: float, keys: str | None = None) -> None:
    """While ``publishing`` is set, publish a policy as new weights, with ``every`` seconds between two versions.

    Each version is higher than the versions of the bundle and of all connected policy servers.
    """
    bus = Bus(keys=open_keys(keys))
    bus.serve(endpoint, ServerLink("learner", "learner", {"policy": ()}, {}, secrets.randbits(63)))
    version, due = int(bundle.provenance["version"]), 0.0
    while True:
        bus.receive(0.01)
        now, peers = time.monotonic(), bus.peers("learner")
        if publishing.is_set() and peers and now >= due:
            version, due = 1 + max([version, *(peer.hello.weights_version for peer in peers)]), now + every
            payload = dataclasses.replace(bundle, provenance={"version": version}).encode()
            for peer in peers:
                bus.send(peer, Weights(version, 0, 0, sha256(payload), payload))


@contextlib.contextmanager
def deployed(folder: Path, hidden: tuple[int, ...]) -> Iterator[str]:
    """Start a policy server and yield its endpoint."""
    example.bundle(hidden).save(folder / "policy.safetensors")
    endpoint = f"ipc://{folder}/policy"
    config = {
        "endpoints": {"policy": endpoint, "learner": f"ipc://{folder}/learner"},
        "safety": {"limits": [-0.9, 0.9], "observation_deadline_ms": 1e6},
    }
    (folder / "robot.yaml").write_text(json.dumps(config))  # JSON is also valid YAML
    command = [sys.executable, "-m", "td3_robot.cli.main", "policy", "--bundle", str(folder / "policy.safetensors")]
    process = subprocess.Popen([*command, "--config", str(folder / "robot.yaml")], stderr=subprocess.DEVNULL)
    try:
        yield endpoint
    finally:
        process.terminate()
        process.wait(TIMEOUT)


def round_trips(robot: Robot, rate: float) -> list[int]:
    """Make round trips at a fixed rate for ``_TURN`` seconds. Return their times in ns.

    If a round trip takes longer than a period, the next round trip begins late, and its time includes the delay.
    """
    trips: list[int] = []
    period = round(1e9 / rate)
    start = time.perf_counter_ns() + period
    for turn in range(round(_TURN * rate)):
        due = start + turn * period
        if (left := due - time.perf_counter_ns()) > 0:
            time.sleep(left / 1e9)
            due = time.perf_counter_ns()
        if not robot.answered(robot.send(), TIMEOUT):
            raise NodeError(f"no action within {TIMEOUT} s")
        trips.append(time.perf_counter_ns() - due)
    return trips


def main() -> int:
    parser = harness.Options("python benchmarks/live_weights.py", "Measure what live weights cost a control loop.")
    parser.number("--hidden", list(example.HIDDEN), "N", "widths of the actor")
    parser.number("--every", 0.1, "S", "seconds between new weights", low=0.001)
    parser.number("--rate", 500.0, "HZ", "rate of the robot")
    parser.number("--seconds", 10, "N", "seconds to measure in each of two cases: with new weights, and without")
    options = parser.parse_args()
    hidden = tuple(options.hidden)
    report: harness.Report = {
        "machine": harness.describe("td3-robot", "numpy", "pyzmq"),
        "bytes": len(example.bundle(hidden).encode()),
        "every_s": options.every,
        "rate_hz": options.rate,
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="td3-robot-bench-"))
        endpoint = stack.enter_context(deployed(Path(folder), hidden))
        context = multiprocessing.get_context("spawn")
        publishing = context.Event()
        arguments = (publishing, f"ipc://{folder}/learner", example.bundle(hidden), options.every)
        learner = context.Process(target=learn, args=arguments, daemon=True)
        learner.start()
        stack.callback(learner.terminate)
        robot = stack.enter_context(contextlib.closing(Robot(endpoint, 1)))
        robot.round_trip()

        def taught() -> list[int]:
            publishing.set()
            trips = round_trips(robot, options.rate)
            publishing.clear()
            return trips

        def quiet() -> list[int]:
            round_trips(robot, options.rate)  # not measured: the server is possibly still adopting the last weights
            return round_trips(robot, options.rate)

        kinds = {"quiet": quiet, "taught": taught}
        taken = harness.take_turns(kinds, options.seconds, warm_up=True)
        if robot.version == 1:
            raise NodeError("the server adopted no weights: nothing was measured")
    for kind, times in taken.items():
        over = {f"over_{bound}_ms": int(np.sum(np.asarray(times) > bound * 1e6)) for bound in _BOUNDS_MS}
        report[kind] = {**harness.percentiles(times), "turns": int(np.size(times)), **over}
    return harness.show(report, options.json, _lines)


def _lines(report: harness.Report) -> Iterator[str]:
    yield f"weights of {report['bytes']:,} bytes every {report['every_s']:g} s; {report['rate_hz']:g} Hz"
    yield harness.PERCENTILES + "".join(f" {f'> {bound} ms':>8}" for bound in _BOUNDS_MS)
    for kind in ("quiet", "taught"):
        over = "".join(f" {report[kind][f'over_{bound}_ms']:8}" for bound in _BOUNDS_MS)
        yield harness.percentile_row(kind, report[kind]) + over


if __name__ == "__main__":
    harness.run_script(main)
