"""The task "skeleton" as a Gymnasium environment. It works unchanged.

For your own task, replace the parts marked REPLACE. To train:

PYTHONPATH=. td3-robot train skeleton.yaml
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from td3_robot import Channel, RobotSpec

Array = np.ndarray[Any, Any]


class SkeletonTask(gymnasium.Env[Array, Array]):
    """The robot is one joint. Each action is a velocity of this joint, and the goal is angle 0."""

    # REPLACE: name, unit, lowest and highest value of each channel, and the control period in seconds. The robot's
    # driver must have the same specification.
    robot_spec = RobotSpec(
        "Skeleton",
        observations=(Channel("joint.angle", "rad", -3.0, 3.0),),
        actions=(Channel("joint.velocity", "rad/s", -1.0, 1.0),),
        control_period=0.05,
    )
    # REPLACE: sizes and limits of the same channels.
    observation_space = Box(-3.0, 3.0, (1,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode. Take all random numbers from ``self.np_random``, so that a lock-step run is repeatable."""
        super().reset(seed=seed, options=options)
        # REPLACE: choose the first state.
        self._angle = self.np_random.uniform(-1.0, 1.0)
        return self._observation(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Simulate one control period. ``action`` has one number for each action channel, within the limits."""
        # REPLACE: the physics, the reward, and whether the task has ended, for example by a fall.
        velocity = float(action[0])
        self._angle = float(np.clip(self._angle + velocity * self.robot_spec.control_period, -3.0, 3.0))
        reward = -abs(self._angle) - 0.01 * velocity**2
        terminated = False
        return self._observation(), reward, terminated, False, {}

    def _observation(self) -> Array:
        return np.array([self._angle], np.float32)


# REPLACE: how many control periods an episode has at most.
gymnasium.register("Skeleton-v0", SkeletonTask, max_episode_steps=100)
