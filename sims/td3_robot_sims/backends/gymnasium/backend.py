"""Gymnasium's tasks, as two backends: ``gymnasium`` for continuous actions, ``discrete`` for discrete ones.

A task's name is an ID of Gymnasium's registry, or ``MODULE:ID`` if MODULE registers the ID when it is imported.
"""

from __future__ import annotations

import importlib

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.specs import RobotSpec
from td3_robot_sims.backends.base import Backend, Environment


class GymnasiumBackend(Backend):
    """Tasks with a vector of continuous actions; see :class:`GymnasiumEnvironment`."""

    packages = ("numpy", "gymnasium")
    environment = "GymnasiumEnvironment"

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._specs: dict[str, RobotSpec] = {}  # of the newest environment of each task

    def spec(self, name: str) -> RobotSpec:
        if name not in self._specs:
            self.make(name, None, None).close()
        return self._specs[name]

    def make(self, name: str, seed: int | None, randomization: RandomizationConfig | None) -> Environment:
        module = importlib.import_module("td3_robot_sims.backends.gymnasium.environment")
        environment: Environment = getattr(module, self.environment)(self.kind, name, seed, randomization)
        self._specs[name] = environment.spec
        return environment

    def module(self, name: str) -> str:
        return name.rpartition(":")[0]

    def gymnasium_id(self, name: str) -> str | None:
        return name.rpartition(":")[2]


class DiscreteBackend(GymnasiumBackend):
    """Tasks with discrete actions; see :class:`DiscreteEnvironment`."""

    environment = "DiscreteEnvironment"

    def gymnasium_id(self, name: str) -> None:
        """Return None, because Gymnasium's environment with the ID of this task takes other actions.

        Gymnasium's environment takes integers. An action of this task is one score for each discrete action.
        """
        del name
