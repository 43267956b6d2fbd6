"""Memory does not grow over thousands of episodes. One seed gives the same numbers in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest

# One huge page would count as 2 MB, so the code turns huge pages off. smaps_rollup is exact; /proc/self/statm lags.
MEMORY = r"""
import ctypes, re, sys
from pathlib import Path
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
import numpy as np
from td3_robot_sims import tasks
environment = tasks.make(sys.argv[1], 0)
action = np.zeros(environment.spec.action_size, np.float32)
def episodes(count):
    for _ in range(count):
        environment.reset()
        for _ in range(2):
            environment.step(action)
    return 1024 * int(re.search(r"(?m)^Rss: +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text())[1])
before = episodes(500)
print(episodes(10_000) - before)
"""

TRACE = """
import hashlib, sys
from td3_robot_sims import tasks
from tests.sims.policies import Random
digest = hashlib.sha256()
for task in tasks.names():
    environment = tasks.make(task, int(sys.argv[1]))
    policy, ended = Random(int(sys.argv[1]), 1.0), True
    for _ in range(300):
        if ended:
            observation = environment.reset()
            digest.update(observation.tobytes())
        outcome = environment.step(policy(observation, environment.spec.action_size))
        digest.update(outcome.observation.tobytes() + repr(outcome[1:]).encode())
        ended = outcome.terminated or outcome.truncated
    environment.close()
print(digest.hexdigest())
"""


def run(code: str, argument: str) -> str:
    return subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("task", ["Walker2D", "Ant"])
def test_memory_does_not_grow_over_resets(task: str) -> None:
    """After 500 resets, the next 10,000 resets add less than 2¹⁹ bytes to the process: 52 bytes per reset."""
    growth = int(run(MEMORY, task))
    print(f"{task}: {growth} bytes")
    assert growth < 2**19


def test_one_seed_gives_the_same_run_in_every_process(seed: int) -> None:
    """For all robots, the test compares 300 steps and their resets: each observation, reward and ending."""
    first = run(TRACE, str(seed))
    assert run(TRACE, str(seed)) == first
    assert run(TRACE, str(seed + 1)) != first
