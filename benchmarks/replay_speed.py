"""What replay costs at a million transitions: insert one, sample 256, and for LAP the new priorities of those.

    python benchmarks/replay_speed.py [--transitions 1000000] [--json]

Walker2D's sizes (22 observations, 6 actions). The two kinds take turns; the median over the turns is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from td3_robot.learner.prioritised import PrioritisedReplay
from td3_robot.learner.replay import ReplayBuffer

OBSERVATIONS, ACTIONS, BATCH = 22, 6, 256
TURNS, CALLS = 15, 50


def filled(buffer: ReplayBuffer) -> ReplayBuffer:
    random = np.random.default_rng(0)
    while len(buffer) < buffer.capacity:
        buffer.add(*rows(random, 50_000))
    return buffer


def rows(random: np.random.Generator, count: int) -> tuple[Any, ...]:
    def numbers(*shape: int) -> Any:
        return random.random((count, *shape), np.float32)

    return numbers(OBSERVATIONS), numbers(ACTIONS), numbers(), numbers(OBSERVATIONS), numbers()


def microseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        work()
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000, help="in the buffer (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    uniform = filled(ReplayBuffer(arguments.transitions, OBSERVATIONS, ACTIONS, 0))
    lap = filled(PrioritisedReplay(arguments.transitions, OBSERVATIONS, ACTIONS, 0, 0.4))
    one = rows(np.random.default_rng(1), 1)
    errors = [torch.from_numpy(np.random.default_rng(2).exponential(3, (BATCH, 1)).astype(np.float32))]

    draws = np.random.default_rng(3)

    def learned() -> None:  # other transitions each time: whose priorities are in no cache
        lap._drawn = draws.integers(0, len(lap), BATCH)
        lap.learned(errors)

    work: dict[str, Callable[[], object]] = {
        "uniform, insert 1": lambda: uniform.add(*one),
        "uniform, sample 256": lambda: uniform.sample(BATCH),
        "lap, insert 1": lambda: lap.add(*one),
        "lap, sample 256": lambda: lap.sample(BATCH),
        "lap, new priorities of 256": learned,
    }
    turns: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(TURNS):
        for name, call in work.items():
            turns[name].append(microseconds(call))
    medians = {name: statistics.median(values) for name, values in turns.items()}
    if arguments.json:
        print(json.dumps({"transitions": arguments.transitions, "microseconds": medians}))
    else:
        for name, value in medians.items():
            print(f"{name:28s}{value:8.1f} µs   [{min(turns[name]):.1f}, {max(turns[name]):.1f}]")


if __name__ == "__main__":
    main()
