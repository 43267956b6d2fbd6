"""SBX in the benchmarks that compare with Stable-Baselines3."""

from __future__ import annotations

import importlib.util
import os

SBX = ("sbx-rl", "jax") if importlib.util.find_spec("sbx") else ()
"""The packages of SBX; empty if it is not installed."""


def use_cores(count: int) -> None:
    """Limit this process to the first cores. JAX has no setting for its threads: it starts one for each core."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
