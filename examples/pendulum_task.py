"""The pendulum of pendulum_driver.py as a task to train on. The motor is too weak to lift the pendulum directly.

``robot_spec`` is the driver's specification: names, units and limits of the channels, and the control period. So a
policy that learns this task can drive the robot of pendulum_driver.py. The physics of the two files differs on purpose,
as simulation and reality differ.

    td3-robot train pendulum.yaml --out runs/pendulum
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pendulum_driver import Pendulum

MASS, LENGTH, GRAVITY, DAMPING = 0.5, 0.4, 9.81, 0.3  # kg, m, m/s², 1/s


class SwingUp(gymnasium.Env[np.ndarray[Any, Any], np.ndarray[Any, Any]]):
    """At angle 0, the pendulum hangs down.

    A torque of 1.96 N·m holds the pendulum horizontal, but the motor gives at most 1 N·m.
    """

    robot_spec = Pendulum.spec
    observation_space = spaces.Box(
        np.array([-1, -1, -30], np.float32), np.array([1, 1, 30], np.float32), dtype=np.float32
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Start at a random angle, with a random velocity of at most 2 rad/s."""
        super().reset(seed=seed, options=options)
        self._angle, self._velocity = self.np_random.uniform([-math.pi, -2.0], [math.pi, 2.0]).tolist()
        return self._observation(), {}

    def step(self, action: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """Simulate one control period with four Runge-Kutta steps of 5 ms."""
        torque = float(action[0])
        for _ in range(4):
            self._angle, self._velocity = _runge_kutta(self._angle, self._velocity, torque, 0.005)
        observation = self._observation()
        return observation, -float(observation[1]) - 0.01 * torque**2, False, False, {}

    def _observation(self) -> np.ndarray[Any, Any]:
        velocity = min(30.0, max(-30.0, self._velocity))
        return np.array([math.sin(self._angle), math.cos(self._angle), velocity], np.float32)


def _runge_kutta(angle: float, velocity: float, torque: float, time: float) -> tuple[float, float]:
    def acceleration(angle: float, velocity: float) -> float:
        return -GRAVITY / LENGTH * math.sin(angle) + torque / (MASS * LENGTH**2) - DAMPING * velocity

    v1, a1 = velocity, acceleration(angle, velocity)
    v2, a2 = velocity + a1 * time / 2, acceleration(angle + v1 * time / 2, velocity + a1 * time / 2)
    v3, a3 = velocity + a2 * time / 2, acceleration(angle + v2 * time / 2, velocity + a2 * time / 2)
    v4, a4 = velocity + a3 * time, acceleration(angle + v3 * time, velocity + a3 * time)
    return angle + time * (v1 + 2 * v2 + 2 * v3 + v4) / 6, velocity + time * (a1 + 2 * a2 + 2 * a3 + a4) / 6


gymnasium.register("SwingUp-v0", SwingUp, max_episode_steps=250)
