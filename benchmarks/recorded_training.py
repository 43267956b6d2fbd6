"""Measure how much recording slows down a training.

    python benchmarks/recorded_training.py [walker2d] [--blocks 12] [--stretch 5] [--set KEY=VALUE] [--json]

The benchmark divides one training into stretches: plain, recorded, recorded, plain, and so on. A recorder runs in the
recorded stretches. With this order, slow changes of the machine's load affect both kinds equally. Each block of four
stretches gives one ratio: environment steps per second with a recorder, divided by environment steps per second without
a recorder. The result is the median ratio over the blocks, with a 95 % confidence interval. The benchmark also measures
processor time, which hardly depends on the load.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from td3_robot.bench import harness
from td3_robot.config import loading as configuration
from td3_robot.errors import NodeError, exit_code_of
from td3_robot.messages import Status
from td3_robot.runtime import launch
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.supervisor import Supervisor
from td3_robot.util.machine import processor_seconds

_OVERRIDES = ("record=false", "evaluation.every=0", "checkpoint.every=0", "total_steps=1000000000")
_SETTLING = 2  # before each stretch, wait for this number of learner reports; the learner reports every 0.5 s
STOP_TIMEOUT = 60.0  # seconds for a recorder to close its file
_CONFIDENCE = 0.95
_NAMES = {False: "plain", True: "recorded"}


@dataclass(frozen=True)
class Point:
    """Totals at one moment.

    These are the learner's environment steps, the learner's clock (s), and the processor time (s) of the training and
    of the recorder.
    """

    steps: float
    wall_s: float
    training_s: float
    recorder_s: float


@dataclass(frozen=True)
class Stretch:
    """A part of the training, with a recorder or without."""

    recorded: bool
    begin: Point
    end: Point


class _FinishedError(Exception):
    """Ends the training after the last stretch."""


def options(script: str, purpose: str) -> argparse.Namespace:
    """Parse the options of this script, or of another script that measures in the same way."""
    parser = harness.Options(f"python benchmarks/{script}.py", purpose, ("walker2d --blocks 12", "walker2d --json"))
    parser.add_argument("config", nargs="?", default="walker2d", help="configuration (default: %(default)s)")
    parser.number("--blocks", 8, "N", "blocks of four stretches")
    parser.number("--stretch", 5.0, "S", "length of a stretch in seconds")
    parser.number("--warm-up", 1000, "STEPS", "environment steps before the first stretch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the config")
    return parser.parse_args()


def main() -> int:
    chosen = options("recorded_training", "Measure how much recording slows down a training.")
    report = {"machine": harness.describe("numpy", "msgspec", "mcap", "torch")}
    with tempfile.TemporaryDirectory() as folder:
        sizes = (chosen.blocks, chosen.stretch, chosen.warm_up)
        report |= measure(chosen.config, Path(folder), *sizes, chosen.set, Recorders)
    return harness.show(report, chosen.json, lines)


def measure(
    task: str,
    folder: Path,
    blocks: int,
    seconds: float,
    warm_up: int,
    overrides: Sequence[str],
    companion: type[Recorders],
) -> dict[str, Any]:
    """Train and measure.

    Args:
        task: a configuration file, or the name of a shipped one.
        folder: folder for the run.
        blocks: number of blocks of four stretches.
        seconds: length of a stretch.
        warm_up: environment steps before the first stretch; updates begin after half of them.
        overrides: ``KEY=VALUE`` for the configuration.
        companion: class that starts and stops the process whose cost we measure.

    Raises:
        ConfigError: the configuration does not exist or is not valid.
        NodeError: the training, or a recorder, ends too early.
    """
    config = configuration.load(task, (*_OVERRIDES, f"learner.learning_starts={warm_up // 2}", *overrides))
    run = RunFolder.create(folder / "run", config)
    processes = launch.expand(launch.load(config.launch), config)
    stretches: list[Stretch] = []
    with Supervisor(run, config, processes, lambda _: None) as supervisor, companion(run, folder) as recorders:

        def point(status: Status) -> Point:
            pids = [it.process.pid for it in supervisor.children if isinstance(it.process, subprocess.Popen)]
            training = sum(processor_seconds(pid) or 0.0 for pid in pids)
            return Point(status.figures["env_steps"], status.figures["wall_s"], training, recorders.processor_seconds())

        plan = _plan(recorders, stretches, blocks, seconds, warm_up)
        with contextlib.suppress(_FinishedError):
            if supervisor.supervise(_points_to(plan, point)) == exit_code_of(signal.SIGINT):
                raise KeyboardInterrupt
            raise NodeError(f"the training ended too early; see {run.logs}")
        recorded_bytes = recorders.stop()
    return report(stretches, recorded_bytes)


def report(stretches: Sequence[Stretch], recorded_bytes: int) -> dict[str, Any]:
    """Compute the figures of the report. Each block has four stretches."""
    blocks = [stretches[first : first + 4] for first in range(0, len(stretches), 4)]
    throughput, processor = [], []
    for block in blocks:
        rate = {r: _total(block, r, "steps") / _total(block, r, "wall_s") for r in _NAMES}
        throughput.append(rate[True] / rate[False])
        cost = {r: _total(block, r, "training_s", "recorder_s") / _total(block, r, "steps") for r in _NAMES}
        processor.append(cost[True] / cost[False])
    steps = {r: _total(stretches, r, "steps") for r in _NAMES}
    recorder_s = _total(stretches, True, "recorder_s")
    return {
        "blocks": len(blocks),
        "steps_per_s": {name: steps[r] / _total(stretches, r, "wall_s") for r, name in _NAMES.items()},
        "throughput_ratio": median_with_interval(throughput),
        "processor_time_ratio": median_with_interval(processor),
        "recorder_ms_per_step": 1e3 * recorder_s / steps[True],
        "training_ms_per_step": {
            name: 1e3 * _total(stretches, r, "training_s") / steps[r] for r, name in _NAMES.items()
        },
        "recorder_share": recorder_s / _total(stretches, True, "training_s"),
        "recorder_processors": recorder_s / _total(stretches, True, "wall_s"),
        "recorded_mb": recorded_bytes / 1e6,
    }


def _total(stretches: Sequence[Stretch], recorded: bool, *fields: str) -> float:
    """Add up how much the fields of :class:`Point` grow in the stretches of one kind (recorded or plain)."""
    chosen = [stretch for stretch in stretches if stretch.recorded == recorded]
    total: float = sum(
        getattr(stretch.end, name) - getattr(stretch.begin, name) for stretch in chosen for name in fields
    )
    return total


def median_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the median of independent values, and a confidence interval for the true median.

    ``low`` is the k-th smallest value, and ``high`` is the k-th largest. The true median lies outside this interval
    with a probability of at most 5 % (sign test, binomial distribution). The function uses the largest k for which this
    holds. Fewer than six values give no interval.
    """
    ordered, count = sorted(values), len(values)
    outside, k = 2 * 0.5**count, 0
    while outside <= 1 - _CONFIDENCE:
        k += 1
        outside += 2 * math.comb(count, k) * 0.5**count
    low, high = (ordered[k - 1], ordered[-k]) if k else (None, None)
    return {"median": statistics.median(values), "low": low, "high": high, "values": [round(v, 4) for v in values]}


class Recorders:
    """Starts and stops a recorder process. Use it as a context manager: the end of the block kills the recorder."""

    def __init__(self, run: RunFolder, folder: Path) -> None:
        self.run = run
        self._file = folder / "recorded.mcap"
        self.process: subprocess.Popen[bytes] | None = None
        self._bytes = 0

    def __enter__(self) -> Recorders:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        command = [sys.executable, "-m", "td3_robot.recording.node", str(self._file), "--run", str(self.run.path)]
        with (self.run.logs / "recorder.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> int:
        """Stop the recorder if it runs. Return the number of bytes that all recorders have written."""
        if self.process:
            self.process.terminate()
            self.process.wait(STOP_TIMEOUT)
            self.process = None
            self._bytes += self._file.stat().st_size
            self._file.unlink()
        return self._bytes

    def writes(self) -> bool:
        """Return whether the recorder has begun to write.

        Raises:
            NodeError: the recorder has ended.
        """
        assert self.process
        if self.process.poll() is not None:
            raise NodeError(f"the recorder ended too early; see {self.run.logs / 'recorder.log'}")
        return self._file.exists() and self._file.stat().st_size > 0

    def processor_seconds(self) -> float:
        return (processor_seconds(self.process.pid) or 0.0) if self.process else 0.0


def _plan(
    recorders: Recorders, stretches: list[Stretch], blocks: int, seconds: float, warm_up: int
) -> Generator[None, Point, None]:
    """Measure all stretches, and start and stop the recorders. Each ``yield`` receives the next point."""
    point = yield
    while point.steps < warm_up:
        point = yield
    for number in range(4 * blocks):
        recorded = number % 4 in (1, 2)
        if number % 4 == 1:
            recorders.start()
            while not recorders.writes():
                point = yield
        elif number % 4 == 3:
            recorders.stop()
        for _ in range(_SETTLING):
            point = yield
        begin = point
        while point.wall_s - begin.wall_s < seconds:
            point = yield
        if recorded:
            recorders.writes()  # raises NodeError if the recorder has ended
        stretches.append(Stretch(recorded, begin, point))


def _points_to(
    plan: Generator[None, Point, None], point: Callable[[Status], Point]
) -> Callable[[Mapping[str, Status]], None]:
    """Return a callback for the supervisor.

    For each new report of the learner, the callback sends a point to the plan.
    """
    last: Status | None = None
    next(plan)

    def watch(statuses: Mapping[str, Status]) -> None:
        nonlocal last
        status = statuses.get("learner")
        if status is None or status is last or "wall_s" not in status.figures:
            return
        last = status
        try:
            plan.send(point(status))
        except StopIteration:
            raise _FinishedError from None

    return watch


def lines(figures: harness.Report) -> Iterator[str]:
    return (f"{name:28} {_figure(value)}" for name, value in figures.items() if name != "machine")


def _figure(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:12.3f}"
    if "median" not in value:
        return "  ".join(f"{part:12.3f} {name}" for name, part in value.items())
    if value["low"] is None:
        return f"{value['median']:12.3f} (no 95 % interval: fewer than 6 values)"
    return f"{value['median']:12.3f} (95 % interval: {value['low']:.3f} to {value['high']:.3f})"


if __name__ == "__main__":
    harness.run_script(main)
