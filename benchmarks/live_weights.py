"""What live weights cost a control loop: round trips of one robot by the clock, while a learner teaches or does not.

    python benchmarks/live_weights.py [--hidden 400,300] [--every 0.1] [--rate 500] [--seconds 10] [--json]

A policy server as deployed (the real node, `td3-robot policy`), a robot that asks by the clock, and a learner that
publishes good weights every so many seconds, in a process of its own. Quiet and taught spells of a second take turns,
so that a noisy machine treats them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.bench import example
from td3_robot.bench.peers import Robot
from td3_robot.bundle import sha256
from td3_robot.messages import Weights
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ServerLink
from td3_robot.util import machine

_SPELL = 1.0  # seconds
_PATIENCE = 30.0  # seconds


def teach(endpoint: str, hidden: tuple[int, ...], every: float, teaching: Event) -> None:
    """A learner: new weights to whoever is there, while it is asked for."""
    bus = Bus()
    session = ServerLink("learner", "learner", {"policy": ()}, {}, 1)
    bus.serve(endpoint, session)
    bundle = example.bundle(hidden)
    version, due = 1, 0.0
    while True:
        bus.receive(0.01)
        now = time.monotonic()
        if teaching.is_set() and now >= due:
            version, due = version + 1, now + every
            payload = dataclasses.replace(bundle, provenance={"version": version}).encode()
            for peer in bus.peers("learner"):
                bus.send(peer, Weights(version, 0, 0, sha256(payload), payload))


@contextlib.contextmanager
def deployed(folder: Path, hidden: tuple[int, ...]) -> Iterator[str]:
    """A policy server; its endpoint."""
    example.bundle(hidden).save(folder / "policy.safetensors")
    endpoint = f"ipc://{folder}/policy"
    config = {
        "endpoints": {"policy": endpoint, "learner": f"ipc://{folder}/learner"},
        "safety": {"limits": [-0.9, 0.9], "observation_deadline_ms": 1e6},
    }
    (folder / "robot.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "td3_robot.cli.main", "policy", "--bundle", str(folder / "policy.safetensors")]
    process = subprocess.Popen([*command, "--config", str(folder / "robot.yaml")], stderr=subprocess.DEVNULL)
    try:
        yield endpoint
    finally:
        process.terminate()
        process.wait(_PATIENCE)


def spell(robot: Robot, rate: float) -> list[int]:
    """Round trips by the clock for a second, in ns; those that outlast a period count from where they were due."""
    trips: list[int] = []
    period = round(1e9 / rate)
    start = time.perf_counter_ns() + period
    for turn in range(round(_SPELL * rate)):
        due = start + turn * period
        if (left := due - time.perf_counter_ns()) > 0:
            time.sleep(left / 1e9)
            due = time.perf_counter_ns()
        sequence = robot.send()
        if not robot.answered(sequence, _PATIENCE):
            raise SystemExit("no action came")
        trips.append(time.perf_counter_ns() - due)
    return trips


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", default="400,300", metavar="N,N", help="widths of the actor (default: %(default)s)")
    parser.add_argument("--every", type=float, default=0.1, metavar="S", help="between weights (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=500.0, metavar="HZ", help="of the robot (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=10, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    hidden = tuple(int(width) for width in options.hidden.split(","))
    computer = machine.describe(("td3-robot", "numpy", "pyzmq"))
    report: dict[str, Any] = {"machine": computer, "bytes": len(example.bundle(hidden).encode())}
    trips: dict[str, list[int]] = {"quiet": [], "taught": []}
    context = multiprocessing.get_context("spawn")
    teaching = context.Event()
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as name, deployed(Path(name), hidden) as endpoint:
        arguments = (f"ipc://{name}/learner", hidden, options.every, teaching)
        learner = context.Process(target=teach, args=arguments, daemon=True)
        learner.start()
        with contextlib.closing(Robot(endpoint, 1)) as robot:
            robot.round_trip()
            for number in range(-1, options.seconds):  # the first of each kind only warms up
                for kind, times in trips.items():
                    (teaching.set if kind == "taught" else teaching.clear)()
                    taken = spell(robot, options.rate)
                    if number >= 0:
                        times += taken
            adopted = robot.version - 1
        learner.terminate()
        learner.join()
    if not adopted:
        raise SystemExit("no weights were adopted: nothing was measured")
    for kind, times in trips.items():
        over = {f"over_{bound}_us": int(np.sum(np.asarray(times) > bound * 1000)) for bound in (1000, 2000, 5000)}
        report[kind] = {**example.spread(times), "turns": len(times), **over}
    if options.json:
        print(json.dumps(report))
        return 0
    print(f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before")
    print(f"weights of {report['bytes']:,} bytes every {options.every:g} s; {options.rate:g} Hz")
    print(example.HEAD + f" {'> 1 ms':>8} {'> 2 ms':>8} {'> 5 ms':>8}")
    for kind in trips:
        figures = report[kind]
        print(example.row(kind, figures), *(f"{figures[f'over_{bound}_us']:8}" for bound in (1000, 2000, 5000)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
