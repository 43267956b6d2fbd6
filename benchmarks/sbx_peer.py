"""Helpers for the benchmarks that measure SBX together with Stable-Baselines3."""

from __future__ import annotations

import importlib.util
import os

SBX = ("sbx-rl", "jax") if importlib.util.find_spec("sbx") else ()
"""The packages of SBX; empty if it is not installed."""


def use_cores(count: int) -> None:
    """Let this process use only ``count`` processor cores.

    JAX has no setting for its number of threads. It starts one for each core that the process may use.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
