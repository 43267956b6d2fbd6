"""Measure the time to insert a transition and the time to sample a batch, in three full replay buffers.

    python benchmarks/replay_speed.py [--transitions 1000000] [--repetitions 5] [--seconds 1.0] [--folder DIR] [--json]

One buffer is in memory, one is in a file, and one has prioritised replay (LAP). Transitions have Walker2D's sizes. An
insert stores one transition, as the learner does for a Step of one robot. In the buffer with a file, an insert also
writes a journal record, which contains the state of the source. With LAP, the time to sample a batch includes the
update of the priorities.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from td3_robot.bench import harness
from td3_robot.bench.example import ACTIONS, BATCH, OBSERVATIONS, transitions
from td3_robot.learner.divergence import Divergence
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.learner.replay_buffer.prioritised import PrioritisedReplay
from td3_robot.learner.replay_buffer.storage import File, Note, Storage
from td3_robot.learner.sources import Source

_AT_ONCE = 10_000  # transitions that one call adds while a buffer is filled
_BLOCK = 50  # calls between two readings of the clock


def contestants(count: int, folder: Path) -> dict[str, ReplayBuffer]:
    """Make one full buffer of each kind."""
    buffers = {
        "memory": ReplayBuffer(count, OBSERVATIONS, ACTIONS, 0, Storage),
        "lap": PrioritisedReplay(count, OBSERVATIONS, ACTIONS, 0, 0.4),
        "file": ReplayBuffer(count, OBSERVATIONS, ACTIONS, 0, lambda *size: File(folder, *size)),
    }
    rows = (*transitions(_AT_ONCE), np.ones(_AT_ONCE, np.float32))
    for buffer in buffers.values():
        for _ in range(-(-count // _AT_ONCE)):
            buffer.add(*rows)
    return buffers


def work() -> dict[str, Callable[[ReplayBuffer], object]]:
    """Return the functions to measure with each buffer."""
    row, source = (*transitions(1), np.ones(1, np.float32)), Source("sim-0")
    errors = torch.randn(2, BATCH, 1).unbind()
    seen: dict[str, Any] = {"divergence": [{}, Divergence(0.99).state()[1]]}

    def insert(buffer: ReplayBuffer) -> None:
        buffer.add(*row)
        if buffer.storage.durable:
            buffer.storage.commit(Note(buffer.total_added, buffer.total_added, source.name, source.state(), seen))

    def sample(buffer: ReplayBuffer) -> None:
        buffer.sample(BATCH)
        buffer.learned(errors)

    return {"insert": insert, "sample": sample}


def microseconds(seconds: float, call: Callable[[ReplayBuffer], object], buffer: ReplayBuffer) -> float:
    """Return the time of one call in µs, measured over this many seconds."""

    def run(calls: int) -> None:
        for _ in range(calls):
            call(buffer)

    calls, passed = harness.repeat_for(seconds, run, _BLOCK)
    return passed / calls * 1e6


def main() -> int:
    parser = harness.Options("python benchmarks/replay_speed.py", "Measure full replay buffers.")
    parser.number("--transitions", 1_000_000, "N", "size of each buffer")
    parser.number("--repetitions", 5, "N", "measurements of each operation in each buffer")
    parser.number("--seconds", 1.0, "S", "length of one measurement", low=0.001)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="put the buffer's file in a temporary folder in DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        buffers = contestants(options.transitions, Path(folder))
        turns = {
            f"{name}.{what}": partial(microseconds, options.seconds, call, buffer)
            for name, buffer in buffers.items()
            for what, call in work().items()
        }
        taken = harness.take_turns(turns, options.repetitions)
        size = buffers["memory"].storage.rows.nbytes
    report = {
        "transitions": options.transitions,
        "bytes": size,
        "batch": BATCH,
        "microseconds": {name: round(statistics.median(values), 2) for name, values in taken.items()},
        "machine": harness.describe("numpy", "torch"),
    }
    return harness.show(report, options.json, _lines)


def _lines(report: harness.Report) -> Iterator[str]:
    yield f"{report['transitions']:,} transitions, {report['bytes'] / 1e6:.0f} MB; median in µs"
    yield from (f"{name:24} {value:8.1f}" for name, value in report["microseconds"].items())


if __name__ == "__main__":
    harness.run_script(main)
