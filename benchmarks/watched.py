"""Measure what monitors cost a control loop: a robot's round trips at a fixed rate, with and without monitors.

    python benchmarks/watched.py [--monitors 4] [--rate 100] [--seconds 5] [--json]

The policy server is the real node, as deployed, and the monitors are ``td3-robot monitor``. Three kinds of
measurement alternate: without a monitor, with several monitors, and with one monitor that SIGSTOP has stopped.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from live_weights import deployed, round_trips

from td3_robot.bench import example, harness
from td3_robot.bench.peers import TIMEOUT, Robot


@contextlib.contextmanager
def watched(config: Path, robot: Robot, monitors: int, *, stopped: bool = False) -> Iterator[None]:
    """Attach monitors to the server of ``config``. Before the block begins, each monitor has reported an Action."""
    words = [sys.executable, "-m", "td3_robot.cli.main", "monitor", "--config", str(config), "--json", "--every", "0.2"]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(monitors)]
    try:
        for monitor in started:
            assert monitor.stdout
            while '"policy/action"' not in monitor.stdout.readline():
                robot.round_trip()
            if stopped:
                monitor.send_signal(signal.SIGSTOP)
        yield
    finally:
        for monitor in started:
            monitor.kill()
            monitor.wait(TIMEOUT)


def main() -> int:
    parser = harness.Options("python benchmarks/watched.py", "Measure what monitors cost a control loop.")
    parser.number("--monitors", 4, "N", "number of monitors")
    parser.number("--rate", 100.0, "HZ", "rate of the robot")
    parser.number("--seconds", 5, "N", "seconds to measure each case: no monitor, several monitors, a stopped monitor")
    options = parser.parse_args()
    report: harness.Report = {"machine": harness.describe("td3-robot", "numpy", "pyzmq"), "rate_hz": options.rate}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="td3-robot-bench-")))
        endpoint = stack.enter_context(deployed(folder, tuple(example.HIDDEN)))
        robot = stack.enter_context(contextlib.closing(Robot(endpoint, 1)))
        robot.round_trip()

        def trips(monitors: int, *, stopped: bool = False) -> list[int]:
            with watched(folder / "robot.yaml", robot, monitors, stopped=stopped):
                return round_trips(robot, options.rate)

        several = f"{options.monitors} monitors"
        kinds = {
            "no monitor": lambda: trips(0),
            several: lambda: trips(options.monitors),
            "a stopped monitor": lambda: trips(1, stopped=True),
        }
        taken = harness.take_turns(kinds, options.seconds, warm_up=True)
    report["kinds"] = {kind: harness.percentiles(times) for kind, times in taken.items()}
    return harness.show(report, options.json, _lines)


def _lines(report: harness.Report) -> Iterator[str]:
    yield harness.PERCENTILES
    for kind, figures in report["kinds"].items():
        yield harness.percentile_row(kind, figures)


if __name__ == "__main__":
    harness.run_script(main)
