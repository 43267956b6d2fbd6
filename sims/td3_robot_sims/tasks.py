"""Every simulated task by name: ``BACKEND:NAME``, for example ``gymnasium:Pendulum-v1``.

A name without a colon, such as ``Walker2D``, belongs to the backend ``bullet``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from functools import cache

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import USER_CODE, ConfigError, Td3RobotError
from td3_robot.registry import Registry
from td3_robot.specs import RobotSpec
from td3_robot.util import extras
from td3_robot.util.text import exception_line
from td3_robot_sims.backends import results
from td3_robot_sims.backends.base import Backend, Environment

log = logging.getLogger(__name__)

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
        ConfigError: there is no such backend, or it is broken.
    """
    kind, colon, name = task.partition(":")
    if not colon:
        kind, name = DEFAULT, task
    BACKENDS.check(kind, f"the simulator backend of task {task!r}")
    return _load(kind), name


@cache
def _load(kind: str) -> Backend:
    backend: type[Backend] = BACKENDS.load(kind)
    where = f"simulator backend {kind!r}"
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ConfigError(f"{where} is {results.shown(backend)}; it must be a subclass of {_name(Backend)}")
    with _explained(f"{where}: {_name(backend)}({kind!r})"):
        return backend(kind)


def names() -> tuple[str, ...]:
    """Return the tasks of all backends that can list their tasks. The backends of Gymnasium cannot.

    If a backend is broken, log a warning and leave out its tasks.
    """
    listed: list[str] = []
    for kind in BACKENDS.names():
        try:
            backend = _load(kind)
            with _explained(f"simulator backend {kind!r}: names()"):
                listed += [name if kind == DEFAULT else f"{kind}:{name}" for name in backend.names()]
        except ConfigError as error:
            log.warning("%s; the tasks of this backend are not listed", error)
    return tuple(listed)


@cache
def spec(task: str) -> RobotSpec:
    """Return the robot specification of a task.

    Raises:
        ConfigError: see :func:`make`.
    """
    return _spec(task, *find(task))


def _spec(task: str, backend: Backend, name: str) -> RobotSpec:
    method = f"task {task!r}: spec() of simulator backend {backend.kind!r}"
    with _explained(method):
        found = backend.spec(name)
    if not isinstance(found, RobotSpec):
        raise ConfigError(f"{method} returned {results.shown(found)}; it must return a RobotSpec")
    return found


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """If the code of a backend raises an unexpected exception, raise a ConfigError of one line instead."""
    try:
        yield
    except Td3RobotError:
        raise
    except USER_CODE as error:  # the user's code may raise anything
        if isinstance(error, ModuleNotFoundError) and extras.missing(error):
            raise
        raise ConfigError(f"{what} raised {exception_line(error)}") from error


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
            action space that its backend does not support, or does not support ``randomization``. Also raised if the
            backend is broken: for example, its ``make`` raises an exception, or returns no :class:`Environment`, or
            returns an environment whose specification differs from that of its ``spec``.
    """
    backend, name = find(task)
    if randomization:
        backend.check_randomization(randomization)
    method = f"task {task!r}: make() of simulator backend {backend.kind!r}"
    with _explained(method):
        environment = backend.make(name, seed, randomization)
    if not isinstance(environment, Environment):
        raise ConfigError(f"{method} returned {results.shown(environment)}; it must return an Environment")
    try:
        if difference := _spec(task, backend, name).difference(environment.spec):
            raise ConfigError(f"{method} returned another robot than its spec(): {difference}; both must agree")
    except ConfigError:
        environment.close()
        raise
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
