"""Measures which precision and which number of threads give the fastest updates on this machine."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.compute import Precision
from td3_robot.learner.engine.selection import implementation, use_threads
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer

_TURNS = 7  # measurements of each choice
_TURN_S = 0.15  # seconds of one measurement
_MOST_THREADS = 8
# Imitates another process of a training: it works 0.5 ms in every 10 ms. It ends when its parent ends.
_OTHER = """import os, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + 5e-4
    while time.perf_counter() < end:
        pass
    time.sleep(9.5e-3)
"""


class Choice(NamedTuple):
    precision: Precision
    threads: int

    def __str__(self) -> str:
        return f"{self.precision} with {self.threads} thread{'s' if self.threads > 1 else ''}"


def choices(config: LearnerConfig, precisions: Sequence[Precision], cores: int) -> list[Choice]:
    """The precisions and numbers of threads to compare.

    If ``threads`` is ``auto``, the numbers of threads are powers of two, up to ``cores`` and at most 8.
    """
    if config.threads == "auto":
        numbers = [2**power for power in range(min(cores, _MOST_THREADS).bit_length())]
    else:
        numbers = [config.threads]
    return [Choice(precision, number) for precision in precisions for number in numbers]


def speeds(
    config: LearnerConfig, sizes: tuple[int, int], hidden: Sequence[int], compared: Sequence[Choice], others: int
) -> dict[Choice, float]:
    """Updates per second with each choice: the median of several measurements.

    Args:
        sizes: the sizes of observation and action.
        hidden: widths of the hidden layers.
        others: number of other processes that use the cores during the measurement, as in a training.
    """
    learners = {choice: _Learner(config, sizes, hidden, choice) for choice in compared}
    made: dict[Choice, list[float]] = {choice: [] for choice in compared}
    with _others(others):
        for turn in range(_TURNS):
            for choice in compared[:: -1 if turn % 2 else 1]:
                made[choice].append(learners[choice].turn(_TURN_S))
    return {choice: statistics.median(each) for choice, each in made.items()}


class _Learner:
    def __init__(self, config: LearnerConfig, sizes: tuple[int, int], hidden: Sequence[int], choice: Choice) -> None:
        config = replace(config, precision=choice.precision, threads=choice.threads)
        use_threads(config)
        self._threads = torch.get_num_threads()
        self._algorithm: Algorithm = implementation(config)(*sizes, hidden, config, seed=0)
        self._batch = config.batch_size
        self._buffer = ReplayBuffer(4 * self._batch, *sizes, seed=0)
        rows = 4 * self._batch
        rng, ones = np.random.default_rng(0), np.ones(rows, np.float32)
        states, actions = (rng.uniform(-1, 1, (rows, size)).astype(np.float32) for size in sizes)
        self._buffer.add(states, actions, ones, states, ones)

    def turn(self, seconds: float) -> float:
        """Make updates for at least this many seconds, and return the updates per second."""
        torch.set_num_threads(self._threads)
        self._update(2)  # warms up caches
        updates, begin = 0, time.perf_counter()
        while (passed := time.perf_counter() - begin) < seconds:
            self._update(4)
            updates += 4
        return updates / passed

    def _update(self, updates: int) -> None:
        for _ in range(updates):
            self._algorithm.learn(self._buffer.sample(self._batch))


@contextmanager
def _others(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _OTHER]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
