"""An example of a simulator backend in an installed package: a point mass on a line, in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from td3_robot_sims.backends.base import Backend, Environment

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import ConfigError
from td3_robot.specs import Channel, Float32, RobotSpec

PERIOD = 0.05  # s
SPEC = RobotSpec(
    "PointMass",
    (Channel("position", "m", -5.0, 5.0), Channel("velocity", "m/s", -5.0, 5.0)),
    (Channel("force", "N", -1.0, 1.0),),
    PERIOD,
)


class PointMass(Environment):
    """Keep a mass of 1 kg near the origin. An episode ends beyond 4 m or after 100 steps."""

    def __init__(self, seed: int | None, randomization: RandomizationConfig | None) -> None:
        super().__init__(SPEC, 100, seed, randomization)

    def _reset(self) -> Float32:
        self._state = self.random.uniform(-1.0, 1.0, 2)
        return self._state.astype(np.float32)

    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        position, velocity = self._state
        velocity = np.clip(velocity + PERIOD * float(action[0]), -5.0, 5.0)
        position = np.clip(position + PERIOD * velocity, -5.0, 5.0)
        self._state = np.array([position, velocity])
        return self._state.astype(np.float32), -abs(float(position)), bool(abs(position) > 4), False


class PointMassBackend(Backend):
    """A backend with one task, ``Point``."""

    def names(self) -> Sequence[str]:
        return ("Point",)

    def spec(self, name: str) -> RobotSpec:
        if name != "Point":
            raise ConfigError(f"task {self.kind}:{name} does not exist; allowed: Point")
        return SPEC

    def make(self, name: str, seed: int | None, randomization: RandomizationConfig | None) -> Environment:
        self.spec(name)
        return PointMass(seed, randomization)
