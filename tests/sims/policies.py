"""Policies for tests. ``Random`` can make a robot fall within a few steps. ``Stand`` keeps the robot upright."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from td3_robot.specs import Float32


class Policy(Protocol):
    def __call__(self, observation: Float32, size: int) -> Float32:
        """Return the next action, float32[size]."""


class Random:
    """Uniform actions in ± ``scale``. A scale above 1 gives actions outside the action limits."""

    def __init__(self, seed: int, scale: float) -> None:
        self._random = np.random.default_rng(seed)
        self._scale = scale

    def __call__(self, observation: Float32, size: int) -> Float32:  # noqa: ARG002 - the observation is not used
        return self._random.uniform(-self._scale, self._scale, size).astype(np.float32)


class Stand:
    """Springs at the joints hold a pose. The actions also have a little noise.

    ``GAINS`` has a row for each joint: target position in units of its channel, stiffness, damping, gain of the pitch,
    gain of the forward velocity. With these gains, the robot stands for 1000 steps. The numbers that have two or
    three decimals come from a random search.
    """

    GAINS = {  # noqa: RUF012
        "Walker2D": np.array(
            [
                [0.892, 3.474, 0.804, -3.647, -0.168],
                [0.985, 2.11, 1.331, -0.658, -0.705],
                [0.051, 5.711, 0.906, -0.085, 0.563],
            ]
            * 2
        ),
        "Hopper": np.array([[1.01, 3, 1, 0.21, 0], [1.04, 5.61, 1, 0, 0], [0.01, 3, 1, 0, -1.32]]),
        "Ant": np.array([[0, 3, 1, 0, 0]] * 8),
        "HalfCheetah": np.array([[0, 3, 1, 0, 0]] * 6),
    }

    def __init__(self, task: str, seed: int) -> None:
        self._gains = self.GAINS[task].T
        self._noise = Random(seed, 0.05)

    def __call__(self, observation: Float32, size: int) -> Float32:
        # Observation 3 is the forward velocity, 7 is the pitch. From 8 on: position and velocity of each joint.
        target, stiffness, damping, lean, drift = self._gains
        position, velocity = observation[8 : 8 + 2 * size].reshape(size, 2).T
        springs = stiffness * (target - position) - damping * velocity + lean * observation[7] + drift * observation[3]
        return springs.astype(np.float32) + self._noise(observation, size)
