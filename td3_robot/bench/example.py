"""What the benchmarks of policy server and links measure with: a robot, a policy and Steps; and how figures are put."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from td3_robot.bundle import Bundle, Exploration, layer_shapes
from td3_robot.messages import Phase, Step
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Channel, RobotSpec

OBSERVATIONS, ACTIONS = 22, 6  # Walker2D's
HIDDEN = (400, 300)
SOURCE = "bench"
SAFETY = SafetyConfig(limits=(-0.9, 0.9), rate=500.0, low_pass=100.0, observation_deadline_ms=1e6)
"""Everything the safety filter can do, and the watch over observations; with no exploration, as on a robot."""


def spec() -> RobotSpec:
    observations = tuple(Channel(f"o{index}", "1", -5.0, 5.0) for index in range(OBSERVATIONS))
    actions = tuple(Channel(f"a{index}", "1", -1.0, 1.0) for index in range(ACTIONS))
    return RobotSpec("Bench", observations, actions, 0.001)


def bundle(hidden: tuple[int, ...] = HIDDEN) -> Bundle:
    """Random weights of a usual size, with Gaussian exploration."""
    rng = np.random.default_rng(0)
    robot = spec()
    tensors = {
        name: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in layer_shapes(robot, hidden).items()
    }
    return Bundle(robot, hidden, tensors, Exploration("gaussian", 0.1), {"version": 1})


def step(sequence: int, robots: int, rng: np.random.Generator, source: str = SOURCE) -> Step:
    return Step(
        source=source,
        incarnation=0,
        sequence=sequence,
        transitions=sequence * robots,
        stamp=sequence,
        phase=np.full(robots, Phase.MID, np.uint8),
        episode=np.zeros(robots, np.uint64),
        episode_step=np.full(robots, sequence % 1000, np.uint32),
        observation=rng.normal(size=(robots, OBSERVATIONS)).astype(np.float32),
        reward=np.zeros(robots, np.float32),
        action=np.zeros((robots, ACTIONS), np.float32),
        origin=1,
        answered=max(0, sequence - 1),
        weights_version=1,
        noise_kind=0,
        noise_seed=0,
        needs_version=0,
        world={},
    )


def spread(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Percentiles in µs; ``p999`` is the 99.9th."""
    values = np.asarray(nanoseconds, np.float64) / 1e3
    p50, p99, p999 = np.percentile(values, (50, 99, 99.9))
    figures = {"p50": p50, "p99": p99, "p999": p999, "max": values.max()}
    return {name: round(float(value), 1) for name, value in figures.items()}


def row(name: str, figures: dict[str, float]) -> str:
    """One line of a table for people."""
    return f"{name:24} {figures['p50']:9.1f} {figures['p99']:9.1f} {figures['p999']:9.1f} {figures['max']:10.1f}"


HEAD = f"{'µs':24} {'p50':>9} {'p99':>9} {'p99.9':>9} {'max':>10}"
