"""Threads of the engine, and how they handle denormal numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner import compute
from td3_robot.learner.engine import threads
from td3_robot.learner.engine.td3 import FastTD3


def test_the_calling_thread_flushes_denormals_only_during_an_update() -> None:
    """The smallest normal float32 is 1.2e-38. A tenth of 2e-37 is larger, and a tenth of 2e-38 is smaller.

    The second thread always flushes denormals.
    """
    normal, vanishing = torch.tensor(2e-37), torch.tensor(2e-38)
    second = FastTD3(3, 2, (4,), LearnerConfig(threads=2), seed=0).second
    assert second

    def tenths() -> tuple[float, float]:
        return (normal / 10).item(), (vanishing / 10).item()

    with compute.flush_denormals():
        flushed = tenths(), second.submit(tenths).result()
    for normal_tenth, vanishing_tenth in flushed:
        assert normal_tenth == pytest.approx(2e-38, rel=1e-6, abs=0)
        assert vanishing_tenth == 0
    assert tenths()[1] == pytest.approx(2e-39, rel=1e-3, abs=0)  # denormals have fewer bits
    assert second.submit(tenths).result()[1] == 0


FOUR_THREADS = """
import torch
from td3_robot.config.learner import LearnerConfig
from td3_robot.learner import compute
from td3_robot.learner.engine import threads
from td3_robot.learner.engine.td3 import FastTD3

threads.use_threads(4, "critics")
second = FastTD3(3, 2, (4,), LearnerConfig(threads=4), seed=0).second
vanishing = torch.full((1 << 20,), 2e-38)

def tenths():
    bits = (vanishing / 10).view(torch.int32)  # a comparison of floats would flush them to zero
    return [int((half != 0).sum()) for half in bits.chunk(2)]

with compute.flush_denormals():
    print(torch.get_num_threads(), tenths(), second.submit(tenths).result())
print(tenths())
"""


@pytest.mark.parametrize(
    ("count", "where", "inside", "second"),
    [(1, "critics", 1, False), (2, "critics", 1, True), (5, "critics", 2, True), (1, "operators", 1, False),
     (3, "operators", 3, False)],
)  # fmt: skip
def test_threads_run_critics_or_operators(count: int, where: Any, inside: int, second: bool) -> None:
    threads.use_threads(count, where)
    assert torch.get_num_threads() == inside
    config = LearnerConfig(threads=count, threads_in=where)
    assert (FastTD3(3, 2, (4,), config, seed=0).second is not None) == second


def test_denormals_are_also_flushed_in_the_threads_of_operators() -> None:
    """With four threads, there are two main threads. Each has one helper, which computes half of an operator.

    In an update, all four threads flush denormals. After the update, the calling thread computes its half of an
    operator with denormals, but its helper still flushes them.
    """
    done = subprocess.run([sys.executable, "-c", FOUR_THREADS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 [0, 0] [0, 0]", f"[{1 << 19}, 0]"]
