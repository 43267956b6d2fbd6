"""Every task by name: the walking robots, and Gymnasium's as ``gymnasium:ID`` (discrete actions: ``discrete:ID``).

``gymnasium:MODULE:ID`` has a module imported first, which registers it.
"""

from __future__ import annotations

import sys
from functools import cache

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.config.schema import DISCRETE, GYMNASIUM
from td3_robot.errors import ConfigError
from td3_robot.specs import RobotSpec
from td3_robot.util.text import near
from td3_robot_sims.backends.bullet.robots import MODELS, specification
from td3_robot_sims.backends.environment import Environment, Outcome

__all__ = ["Environment", "Outcome", "make", "names", "refuse_import", "spec"]


def names() -> tuple[str, ...]:
    """The robots; tasks of Gymnasium come on top of them."""
    return tuple(MODELS)


@cache
def spec(task: str) -> RobotSpec:
    """The specification of ``task``; of a robot without starting physics.

    Raises:
        ConfigError: see :func:`make`.
    """
    if task.startswith((GYMNASIUM, DISCRETE)):
        environment = make(task)
        environment.close()
        return environment.spec
    _refuse_unknown(task)
    return specification(MODELS[task])


def make(task: str, seed: int | None = None, randomization: RandomizationConfig | None = None) -> Environment:
    """A new environment; call its ``reset`` before its ``step``.

    Args:
        seed: where its random stream starts, >= 0; None draws one from the operating system.
        randomization: what is drawn anew for each episode; None: nothing.

    Raises:
        ConfigError: the task does not exist, needs a package that is not installed, is not a continuous one, or
            cannot be randomized so.
    """
    if randomization and (problem := randomization.problem(task.startswith((GYMNASIUM, DISCRETE)))):
        raise ConfigError(problem)
    if task.startswith(GYMNASIUM):
        from td3_robot_sims.backends.gymnasium.environment import GymnasiumTask

        return GymnasiumTask(task, seed, randomization)
    if task.startswith(DISCRETE):
        from td3_robot_sims.backends.gymnasium.discrete import DiscreteTask

        return DiscreteTask(task, seed, randomization)
    _refuse_unknown(task)
    from td3_robot_sims.backends.bullet.locomotion import Locomotion

    return Locomotion(MODELS[task], seed, randomization=randomization)


def refuse_import(task: str, file: str, remedy: str) -> None:
    """Have no module imported because a file says so that may come from anybody.

    Args:
        task: that the file names.
        file: in words.
        remedy: how a person says that it is meant, with ``{task}`` or ``{module}`` in it.

    Raises:
        ConfigError: the task names a module, and nothing has imported it yet.
    """
    if not task.startswith((GYMNASIUM, DISCRETE)):
        return
    from td3_robot_sims.backends.gymnasium.environment import parts

    _, module, _ = parts(task)
    if module and module not in sys.modules:
        meant = remedy.format(task=task, module=module)
        raise ConfigError(f"{file}: its task {task!r} would have module {module!r} imported; if meant: {meant}")


def _refuse_unknown(task: str) -> None:
    if task not in MODELS:
        by_lower_case = {name.lower(): name for name in MODELS}
        alike = near(task.lower(), by_lower_case, 3) or list(by_lower_case)
        raise ConfigError(
            f"task {task!r} does not exist; near ones: {', '.join(by_lower_case[name] for name in alike)} "
            f"(continuous Gymnasium tasks are named {GYMNASIUM}ID, or {GYMNASIUM}MODULE:ID)"
        )
