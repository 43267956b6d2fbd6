"""What a replay buffer of a million transitions costs: an insert and a batch, in memory, in a file, and prioritised.

    python benchmarks/replay_speed.py [--transitions 1000000] [--repetitions 5] [--seconds 1.0] [--folder DIR] [--json]

Rows of the Walker2D sizes (22 observations, 6 actions), batches of 256 from a full buffer. An insert is one transition
of one robot at a time, as a learner does it: with the file's journal record, and the state of the source in it. For LAP
also the new priorities of a batch. All take turns, so that a change in the machine's load meets each; medians over the
turns, in µs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from td3_robot.learner.divergence import Divergence
from td3_robot.learner.prioritised import PrioritisedReplay
from td3_robot.learner.replay import ReplayBuffer
from td3_robot.learner.sources import Source
from td3_robot.learner.storage import File, Memory, Note
from td3_robot.util import machine

OBSERVATIONS, ACTIONS, BATCH = 22, 6, 256
_AT_ONCE = 10_000  # transitions in one call while filling


def one(rng: np.random.Generator, count: int) -> tuple[Any, ...]:
    """Arguments of ``ReplayBuffer.add``."""
    observation = rng.normal(size=(2, count, OBSERVATIONS)).astype(np.float32)
    action = rng.uniform(-1, 1, (count, ACTIONS)).astype(np.float32)
    return observation[0], action, observation[1, :, 0], observation[1], np.ones(count, np.float32)


def microseconds(run: Callable[[], object], seconds: float) -> float:
    """Of one call, over that many seconds of calls."""
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        for _ in range(50):
            run()
        calls += 50
    return passed / calls * 1e6


def measure(transitions: int, repetitions: int, seconds: float, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    buffers = {
        "memory": ReplayBuffer(transitions, OBSERVATIONS, ACTIONS, 0, Memory),
        "file": ReplayBuffer(transitions, OBSERVATIONS, ACTIONS, 0, lambda *size: File(folder, *size)),
        "lap": PrioritisedReplay(transitions, OBSERVATIONS, ACTIONS, 0, 0.4),
    }
    for buffer in buffers.values():
        for _ in range(-(-transitions // _AT_ONCE)):
            buffer.add(*one(rng, _AT_ONCE))
    row, source = one(rng, 1), Source("sim-0")
    seen = {"divergence": [{}, Divergence(0.99).state()[1]]}

    def insert(buffer: ReplayBuffer) -> None:
        buffer.add(*row)
        if buffer.storage.durable:
            buffer.storage.commit(Note(buffer.total_added, buffer.total_added, source.name, source.state(), seen))

    errors = [torch.from_numpy(rng.exponential(3, (BATCH, 1)).astype(np.float32))]

    def learned(buffer: ReplayBuffer) -> None:
        buffer.draw(BATCH)  # other transitions each time, whose priorities are in no cache; it is part of the figure
        buffer.learned(errors)

    work: dict[str, Callable[[ReplayBuffer], object]] = {
        "insert": insert,
        "sample": lambda buffer: buffer.sample(BATCH),
        "draw and learned": learned,
    }
    taken: dict[str, list[float]] = {f"{name}.{what}": [] for name in buffers for what in work}
    for _ in range(repetitions):
        for name, buffer in buffers.items():
            for what, call in work.items():
                taken[f"{name}.{what}"].append(microseconds(lambda call=call, buffer=buffer: call(buffer), seconds))  # type: ignore[misc]
    return {
        "transitions": transitions,
        "bytes": buffers["memory"].storage.rows.nbytes,
        "batch": BATCH,
        "microseconds": {name: round(statistics.median(values), 2) for name, values in taken.items()},
        "machine": machine.describe(("numpy", "torch")),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transitions", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="of each measurement")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the file (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options.transitions, options.repetitions, options.seconds, Path(folder))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{result['transitions']:,} transitions, {result['bytes'] / 1e6:.0f} MB; µs, median")
    for name, value in result["microseconds"].items():
        print(f"{name:24} {value:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
