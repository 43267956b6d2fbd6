"""Every simulated task by name: ``BACKEND:NAME``, for example ``gymnasium:Pendulum-v1``.

A name without a colon, such as ``Walker2D``, belongs to the backend ``bullet``.
"""

from __future__ import annotations

import sys
from functools import cache

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import ConfigError
from td3_robot.registry import Registry
from td3_robot.specs import RobotSpec
from td3_robot_sims.backends.base import Backend, Environment

BACKENDS = Registry(
    "simulator backend",
    {
        "bullet": "td3_robot_sims.backends.bullet.backend:BulletBackend",
        "gymnasium": "td3_robot_sims.backends.gymnasium.backend:GymnasiumBackend",
        "discrete": "td3_robot_sims.backends.gymnasium.backend:DiscreteBackend",
    },
    "td3_robot.backends",
)
"""Subclasses of :class:`Backend` by name. Installed packages can add rows."""
DEFAULT = "bullet"


def find(task: str) -> tuple[Backend, str]:
    """Return the backend of a task, and the task's name in this backend.

    Raises:
        ConfigError: there is no such backend, or it cannot be loaded.
    """
    kind, colon, name = task.partition(":")
    if not colon:
        kind, name = DEFAULT, task
    BACKENDS.check(kind, f"the simulator backend of task {task!r}")
    return _load(kind), name


@cache
def _load(kind: str) -> Backend:
    backend: Backend = BACKENDS.load(kind)(kind)
    return backend


def names() -> tuple[str, ...]:
    """Return the tasks of all backends that can list their tasks. The backends of Gymnasium cannot."""
    listed = [(kind, name) for kind in BACKENDS.names() for name in _load(kind).names()]
    return tuple(name if kind == DEFAULT else f"{kind}:{name}" for kind, name in listed)


@cache
def spec(task: str) -> RobotSpec:
    """Return the robot specification of a task. Raises ConfigError as :func:`make` does."""
    backend, name = find(task)
    return backend.spec(name)


def check(task: str, randomization: RandomizationConfig) -> RobotSpec:
    """Check that a task supports ``randomization``, and return its robot specification.

    Raises:
        ConfigError: see :func:`make`.
    """
    find(task)[0].check_randomization(randomization)
    return spec(task)


def make(task: str, seed: int | None = None, randomization: RandomizationConfig | None = None) -> Environment:
    """Make an environment, see :class:`Environment`.

    Raises:
        ConfigError: the task does not exist, needs a package that is not installed, has an observation space or an
            action space that its backend does not support, or does not support ``randomization``.
    """
    backend, name = find(task)
    if randomization:
        backend.check_randomization(randomization)
    environment = backend.make(name, seed, randomization)
    environment.task_name = task
    return environment


def refuse_import(task: str, file: str, remedy: str) -> None:
    """Refuse a task from an untrusted file if this task imports a new module.

    Args:
        task: name of the task.
        file: name of the file in the error.
        remedy: text for the error: how the user can allow the import. In this text, ``{task}`` stands for the task's
            name, and ``{module}`` for the module's name.

    Raises:
        ConfigError: the task's name contains a module that this process has not imported.
    """
    backend, name = find(task)
    module = backend.module(name)
    if module and module not in sys.modules:
        allow = remedy.format(task=task, module=module)
        raise ConfigError(f"{file}: its task {task!r} would import module {module!r}; to allow this: {allow}")
