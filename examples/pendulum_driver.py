"""A driver for an imaginary robot: a pendulum with a motor, simulated in real time in plain Python.

A driver needs a specification, ``observe`` and ``apply``; see docs/how-to/write_a_driver.md. pendulum_task.py contains
the same robot as a task to train on, with slightly different physics.

    python pendulum_driver.py --config robot.yaml
"""

from __future__ import annotations

import math
import random
import sys
import time

import numpy as np

from td3_robot.driver.node import main
from td3_robot.driver.robot import Robot
from td3_robot.messages import Phase
from td3_robot.specs import Channel, Float32, RobotSpec


class Pendulum(Robot):
    """A pendulum of 0.5 kg at 0.4 m, which hangs down at angle 0. The motor's 1 N·m is too weak to lift it directly.

    Holding the pendulum horizontally needs a torque of 0.5 kg · 9.81 m/s² · 0.4 m = 1.96 N·m.

    Args:
        trial_steps: number of control periods in each episode. Each episode starts at a random angle. If
            ``trial_steps`` is 0, the first episode starts at 0.3 rad and never ends.
    """

    spec = RobotSpec(
        "Pendulum",
        (
            Channel("angle.sin", "1", -1.0, 1.0),
            Channel("angle.cos", "1", -1.0, 1.0),
            Channel("velocity", "rad/s", -30.0, 30.0),
        ),
        (Channel("torque", "N·m", -1.0, 1.0),),
        control_period=0.02,
    )

    def __init__(self, trial_steps: int = 0) -> None:
        self._angle, self._velocity, self._torque = 0.3, 0.0, 0.0
        self._now = time.monotonic()
        self._trial_steps, self._steps = trial_steps, 0

    def observe(self) -> Float32:
        self._simulate()
        velocity = max(-30.0, min(30.0, self._velocity))
        return np.array([math.sin(self._angle), math.cos(self._angle), velocity], np.float32)

    def apply(self, action: Float32) -> None:
        self._simulate()
        self._torque = float(action[0])

    def reward(self, observation: Float32, action: Float32) -> float:
        return -float(observation[1]) - 0.01 * float(action[0]) ** 2  # highest when upright

    def phase(self, observation: Float32) -> Phase:
        del observation
        self._steps += 1
        return Phase.TRUNCATED if self._steps == self._trial_steps else Phase.MID

    def reset(self) -> None:
        self._steps = 0
        if self._trial_steps:
            self._angle, self._velocity = random.uniform(-math.pi, math.pi), random.uniform(-2.0, 2.0)

    def _simulate(self) -> None:
        """Advance the physics to the present moment; a real robot needs no such method."""
        now = time.monotonic()
        steps = min(1000, int((now - self._now) / 0.001))
        self._now += steps * 0.001 if steps < 1000 else now - self._now
        for _ in range(steps):
            acceleration = -9.81 / 0.4 * math.sin(self._angle) + self._torque / (0.5 * 0.4**2) - 0.5 * self._velocity
            self._velocity += acceleration * 0.001
            self._angle += self._velocity * 0.001


if __name__ == "__main__":
    sys.exit(main(Pendulum(), "pendulum"))
