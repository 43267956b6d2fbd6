"""What it costs a training to be recorded: one training, of which a recorder takes part in every other stretch.

Stretches are plain, recorded, recorded, plain, and so on, so that what changes slowly (other load, the learner itself)
falls on both alike. Each block of four gives a ratio of environment steps a second; the figure is the median of these,
with the interval that holds the true median in at least 95 of 100 such measurements. Processor time is counted beside:
other load on the machine hardly changes it.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from td3_robot.config import loading as configuration
from td3_robot.errors import EXIT_INTERRUPTED, NodeError
from td3_robot.messages import Status
from td3_robot.runtime import launch
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.supervisor import Supervisor

_OVERRIDES = ("record=false", "evaluation.every=0", "checkpoint.every=0", "total_steps=1000000000")
_SETTLED = 2  # reports of the learner, half a second apart, that a stretch lets pass before it begins
_STOP = 60.0  # seconds that a recorder has to close its file
_CONFIDENCE = 0.95
_NAMES = {False: "plain", True: "recorded"}


@dataclass(frozen=True)
class Point:
    """Where the training is: the learner's own count and clock, and processor seconds so far of all processes."""

    steps: float
    wall_s: float
    training_s: float
    recorder_s: float


@dataclass(frozen=True)
class Stretch:
    """From one point to another, with a recorder or without."""

    recorded: bool
    begin: Point
    end: Point

    @property
    def steps(self) -> float:
        return self.end.steps - self.begin.steps

    def spent(self, what: str) -> float:
        """By how much a clock of the points went on, in seconds."""
        spent: float = getattr(self.end, what) - getattr(self.begin, what)
        return spent


class _Done(Exception):  # noqa: N818 - it is none
    """All stretches are over."""


def measure(
    task: str, folder: Path, blocks: int, seconds: float, warm_up: int, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Train in ``folder``, and report.

    Args:
        task: a configuration, or the name of one.
        blocks: of four stretches, each so many ``seconds`` long.
        warm_up: environment steps before the first; learning begins after half of them.
        overrides: of keys of the configuration.

    Raises:
        ConfigError: there is no such configuration.
        NodeError: the training, or a recorder, ends too early.
    """
    config = configuration.load(task, (*_OVERRIDES, f"learner.learning_starts={warm_up // 2}", *overrides))
    run = RunFolder.create(folder / "run", config)
    processes = launch.expand(launch.load(config.launch), config)
    stretches: list[Stretch] = []
    with Supervisor(run, config, processes, lambda _: None) as supervisor, _Recorders(run, folder) as recorders:

        def point(status: Status) -> Point:
            pids = [child.popen.pid for child in supervisor.children if child.popen]
            steps, wall = status.figures["env_steps"], status.figures["wall_s"]
            return Point(steps, wall, sum(map(processor_seconds, pids)), recorders.processor_seconds())

        plan = _plan(recorders, stretches, blocks, seconds, warm_up)
        with contextlib.suppress(_Done):
            if supervisor.supervise(_fed(plan, point)) == EXIT_INTERRUPTED:
                raise KeyboardInterrupt
            raise NodeError(f"the training ended by itself; see {run.logs}")
        recorded_bytes = recorders.stop()
    return report(stretches, recorded_bytes)


def report(stretches: Sequence[Stretch], recorded_bytes: int) -> dict[str, Any]:
    """The figures of blocks of four stretches."""
    blocks = [stretches[first : first + 4] for first in range(0, len(stretches), 4)]
    throughput, processor = [], []
    for block in blocks:
        rate = {r: _sum(block, r, "steps") / _sum(block, r, "wall_s") for r in (False, True)}
        throughput.append(rate[True] / rate[False])
        used = {r: (_sum(block, r, "training_s") + _sum(block, r, "recorder_s")) for r in (False, True)}
        processor.append(used[True] / _sum(block, True, "steps") * _sum(block, False, "steps") / used[False])
    steps = {r: _sum(stretches, r, "steps") for r in (False, True)}
    return {
        "blocks": len(blocks),
        "steps_per_s": {_NAMES[r]: steps[r] / _sum(stretches, r, "wall_s") for r in (False, True)},
        "throughput_ratio": median_with_interval(throughput),
        "processor_time_ratio": median_with_interval(processor),
        "recorder_ms_per_step": 1e3 * _sum(stretches, True, "recorder_s") / steps[True],
        "training_ms_per_step": {_NAMES[r]: 1e3 * _sum(stretches, r, "training_s") / steps[r] for r in (False, True)},
        "recorder_share": _sum(stretches, True, "recorder_s") / _sum(stretches, True, "training_s"),
        "recorded_mb": recorded_bytes / 1e6,
    }


def median_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """The median of independent values, and the interval between two of them that holds the true one.

    ``low`` and ``high`` are the k-th value from either end, with the largest k for which a true median lies outside in
    at most 5 of 100 cases, as the binomial distribution has it (the sign test); None for fewer than six values.
    """
    ordered, count = sorted(values), len(values)
    outside, k = 2 * 0.5**count, 0
    while outside <= 1 - _CONFIDENCE:
        k += 1
        outside += 2 * math.comb(count, k) * 0.5**count
    low, high = (ordered[k - 1], ordered[-k]) if k else (None, None)
    return {"median": statistics.median(values), "low": low, "high": high, "values": [round(v, 4) for v in values]}


def processor_seconds(process: int) -> float:
    """Of a process so far, its threads included; 0 if it is gone. Source: proc(5), /proc/PID/stat, fields 14 and 15."""
    try:
        behind_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(behind_name[11]) + int(behind_name[12])) / os.sysconf("SC_CLK_TCK")


class _Recorders:
    """A recorder that comes and goes; leaving it leaves none."""

    def __init__(self, run: RunFolder, folder: Path) -> None:
        self._run = run
        self._file = folder / "recorded.mcap"
        self._process: subprocess.Popen[bytes] | None = None
        self._bytes = 0

    def __enter__(self) -> _Recorders:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def start(self) -> None:
        command = [sys.executable, "-m", "td3_robot.recording.node", str(self._file), "--run", str(self._run.path)]
        with (self._run.logs / "recorder.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> int:
        """End the recorder, if there is one; bytes that all of them have written."""
        if self._process:
            self._process.terminate()
            self._process.wait(_STOP)
            self._process = None
            self._bytes += self._file.stat().st_size
            self._file.unlink()
        return self._bytes

    def writes(self) -> bool:
        """Whether it has begun to.

        Raises:
            NodeError: it has ended.
        """
        assert self._process
        if self._process.poll() is not None:
            raise NodeError(f"the recorder ended by itself; see {self._run.logs / 'recorder.log'}")
        return self._file.exists() and self._file.stat().st_size > 0

    def processor_seconds(self) -> float:
        return processor_seconds(self._process.pid) if self._process else 0.0


def _plan(
    recorders: _Recorders, stretches: list[Stretch], blocks: int, seconds: float, warm_up: int
) -> Generator[None, Point, None]:
    """Is sent points one after another; begins and ends stretches, and recorders with them."""
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
        for _ in range(_SETTLED):
            point = yield
        begin = point
        while point.wall_s - begin.wall_s < seconds:
            point = yield
        if recorded:
            recorders.writes()
        stretches.append(Stretch(recorded, begin, point))


def _fed(plan: Generator[None, Point, None], point: Callable[[Status], Point]) -> Callable[[dict[str, Status]], None]:
    """What a supervisor calls: each new report of the learner goes on to the plan."""
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
            raise _Done from None

    return watch


def _of(stretches: Sequence[Stretch], recorded: bool) -> Iterator[Stretch]:
    return (stretch for stretch in stretches if stretch.recorded == recorded)


def _sum(stretches: Sequence[Stretch], recorded: bool, what: str) -> float:
    if what == "steps":
        return sum(stretch.steps for stretch in _of(stretches, recorded))
    return sum(stretch.spent(what) for stretch in _of(stretches, recorded))
