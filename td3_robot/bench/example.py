"""The robot, policy and data for benchmarks, in Walker2D's sizes. Weights and observations are random."""

from __future__ import annotations

from typing import Any

import numpy as np

from td3_robot.bundle import Bundle, Exploration, layer_shapes
from td3_robot.messages import Phase, Step
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Channel, Float32, RobotSpec

OBSERVATIONS, ACTIONS = 22, 6
HIDDEN = (400, 300)
BATCH = 256
SOURCE = "bench"
SAFETY = SafetyConfig(limits=(-0.9, 0.9), rate=500.0, low_pass=100.0, observation_deadline_ms=1e6)
"""Settings for all parts of the safety filter and for the observation watchdog.

The benchmarks that use these settings also turn the exploration noise off.
"""


def spec(control_period: float = 0.001) -> RobotSpec:
    """Return the specification of the robot."""
    observations = tuple(Channel(f"o{index}", "1", -5.0, 5.0) for index in range(OBSERVATIONS))
    actions = tuple(Channel(f"a{index}", "1", -1.0, 1.0) for index in range(ACTIONS))
    return RobotSpec("Bench", observations, actions, control_period)


def bundle(hidden: tuple[int, ...] = HIDDEN, control_period: float = 0.001) -> Bundle:
    """Return a policy with random weights and Gaussian exploration."""
    rng = np.random.default_rng(0)
    robot = spec(control_period)
    tensors = {
        name: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in layer_shapes(robot, hidden).items()
    }
    return Bundle(robot, hidden, tensors, Exploration("gaussian_v2", 0.1), {"version": 1})


def step(sequence: int, robots: int, rng: np.random.Generator, source: str = SOURCE, **changes: Any) -> Step:
    """Return a Step in the middle of an episode, with random observations; ``changes`` replaces fields."""
    fields: dict[str, Any] = {
        "source": source,
        "incarnation": 0,
        "sequence": sequence,
        "transitions": sequence * robots,
        "stamp": sequence,
        "phase": np.full(robots, Phase.MID, np.uint8),
        "episode": np.zeros(robots, np.uint64),
        "episode_step": np.full(robots, sequence % 1000, np.uint32),
        "observation": rng.normal(size=(robots, OBSERVATIONS)).astype(np.float32),
        "reward": np.zeros(robots, np.float32),
        "action": np.zeros((robots, ACTIONS), np.float32),
        "origin": 1,
        "answered": max(0, sequence - 1),
        "weights_version": 1,
        "noise_kind": 0,
        "noise_seed": 0,
        "needs_version": 0,
        "world": {},
    }
    return Step(**{**fields, **changes})


def transitions(count: int) -> tuple[Float32, Float32, Float32, Float32]:
    """Return random observations [count, 22], actions [count, 6], rewards [count] and next observations [count, 22]."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Float32:
        return rng.standard_normal((count, *shape), np.float32)

    return normal(OBSERVATIONS), np.tanh(normal(ACTIONS)), normal(), normal(OBSERVATIONS)
