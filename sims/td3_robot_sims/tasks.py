"""Every simulated task by name.

A task is named ``BACKEND:NAME``, as ``gymnasium:Pendulum-v1``. A name without a backend is a robot of the backend
``bullet``, as ``Walker2D``.
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
"""Subclasses of :class:`Backend`, by the name that tasks begin with. Installed packages can add rows."""
DEFAULT = "bullet"
"""The backend of names that name none."""


def find(task: str) -> tuple[Backend, str]:
    """The backend of a task, and the task's name there.

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
    """All tasks that can be listed. Gymnasium's cannot: they come with its own registry."""
    listed = [(kind, name) for kind in BACKENDS.names() for name in _load(kind).names()]
    return tuple(name if kind == DEFAULT else f"{kind}:{name}" for kind, name in listed)


@cache
def spec(task: str) -> RobotSpec:
    """The robot of a task.

    Raises:
        ConfigError: see :func:`make`.
    """
    backend, name = find(task)
    return backend.spec(name)


def check(task: str, randomization: RandomizationConfig) -> RobotSpec:
    """Check before a run starts that a task can be made and randomized so; returns its robot.

    Raises:
        ConfigError: see :func:`make`.
    """
    find(task)[0].check_randomization(randomization)
    return spec(task)


def make(task: str, seed: int | None = None, randomization: RandomizationConfig | None = None) -> Environment:
    """A new environment; call its ``reset`` before its ``step``.

    Args:
        seed: seed of its random stream, at least 0; None takes one from the operating system.
        randomization: what to draw anew for each episode; None for nothing.

    Raises:
        ConfigError: the task does not exist, needs a package that is not installed, has spaces that its backend does
            not support, or cannot be randomized so.
    """
    backend, name = find(task)
    if randomization:
        if problem := randomization.problem():
            raise ConfigError(problem)
        backend.check_randomization(randomization)
    return backend.make(name, seed, randomization)


def refuse_import(task: str, file: str, remedy: str) -> None:
    """Refuse to import a module only because an untrusted file names it.

    Args:
        task: the task that the file names.
        file: names the file in the error.
        remedy: how a person allows the import, with ``{task}`` or ``{module}`` in it.

    Raises:
        ConfigError: the task names a module that nothing has imported yet.
    """
    backend, name = find(task)
    module = backend.module(name)
    if module and module not in sys.modules:
        allow = remedy.format(task=task, module=module)
        raise ConfigError(f"{file}: its task {task!r} would have module {module!r} imported; if meant: {allow}")
