"""The walking robots in PyBullet, as a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import ConfigError
from td3_robot.specs import RobotSpec
from td3_robot.util.text import similar
from td3_robot_sims.backends.base import Backend, Environment
from td3_robot_sims.backends.bullet.robots import MODELS, RobotModel, specification


class BulletBackend(Backend):
    """Robots that move on a floor and have torque-driven joints.

    To add robots, a package subclasses this class and sets ``models``.
    """

    models: ClassVar[Mapping[str, RobotModel]] = MODELS
    packages = ("numpy", "pybullet")
    randomization = None

    def names(self) -> Sequence[str]:
        return tuple(self.models)

    def spec(self, name: str) -> RobotSpec:
        return specification(self._model(name))

    def make(self, name: str, seed: int | None, randomization: RandomizationConfig | None) -> Environment:
        model = self._model(name)
        from td3_robot_sims.backends.bullet.locomotion import Locomotion

        return Locomotion(model, seed, randomization=randomization)

    def gymnasium_id(self, name: str) -> str | None:
        from td3_robot_sims import gymnasium_env

        # Gymnasium knows only the robots in MODELS. A package can give the name of such a robot to another robot.
        published = name in MODELS and self.models.get(name) is MODELS[name]
        return f"{gymnasium_env.NAMESPACE}/{name}-v0" if published else None

    def _model(self, name: str) -> RobotModel:
        if name in self.models:
            return self.models[name]
        by_lower_case = {known.lower(): known for known in self.models}
        alike = [by_lower_case[known] for known in similar(name.lower(), by_lower_case, 3)]
        hint = f"similar ones: {', '.join(alike)}" if alike else f"allowed: {', '.join(self.models)}"
        raise ConfigError(
            f"task {name!r} does not exist; {hint} "
            "(a task of another backend is named BACKEND:NAME, for example gymnasium:Pendulum-v1)"
        )
