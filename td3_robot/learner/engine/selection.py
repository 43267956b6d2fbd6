"""Chooses the engine that makes the updates of an algorithm, and the engine's threads."""

from __future__ import annotations

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.ddpg import DDPG
from td3_robot.learner.algorithms.td3 import TD3
from td3_robot.learner.contract import load
from td3_robot.learner.engine import compiled, threads
from td3_robot.learner.engine.compiled import CompiledTD3
from td3_robot.learner.engine.td3 import FastTD3

ENGINES: dict[type[Algorithm], type[FastTD3]] = {TD3: FastTD3, DDPG: FastTD3}
"""Maps an algorithm to the engine that makes the same updates faster.

A subclass of TD3 or DDPG has an engine only if this table names the subclass.
``td3-robot bench learner`` measures the engines, and ``tests/learner/engine/test_td3.py`` compares them with the
algorithms. An engine supports all options of its algorithm, on every device.
"""


def implementation(config: LearnerConfig) -> type[Algorithm]:
    """The class that makes the updates: the engine of the configured algorithm, or the algorithm itself.

    The engine is :class:`CompiledTD3` if ``learner.compile`` is true, the device is the CPU, and
    :func:`compiled.available` is true.
    """
    algorithm = load(config.algorithm)
    if algorithm in ENGINES and config.compiles and compiled.available():
        return CompiledTD3
    return ENGINES.get(algorithm, algorithm)


def has_engine(config: LearnerConfig) -> bool:
    return load(config.algorithm) in ENGINES


def use_threads(config: LearnerConfig) -> None:
    """Set how this process uses ``learner.threads``. Without an engine, all threads work inside PyTorch's operators."""
    threads.use_threads(config.thread_count, config.threads_in if has_engine(config) else "operators")
