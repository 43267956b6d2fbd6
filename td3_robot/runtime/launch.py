"""Launch descriptions: data files that list the processes of a run."""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from td3_robot.config.schema import Config
from td3_robot.config.section import Section
from td3_robot.errors import ConfigError
from td3_robot.util import resources

log = logging.getLogger(__name__)

MOVED = {
    "sims.node": "td3_robot_sims.node",
    "sims.evaluator": "td3_robot_sims.evaluator",
    "sims.evaluate": "td3_robot_sims.evaluate",
    "td3_robot.session.node": "td3_robot.recording.node",
    "td3_robot.session.monitor_node": "td3_robot.monitor.node",
}
"""Old module names in launch descriptions of version 0.1.0, each with the present name of the module."""


class RestartRule(Section, frozen=True):
    """Restart a process after a crash. ``times`` is the largest number of restarts within ``window_s`` seconds."""

    times: Annotated[int, Meta(ge=0)] = 0
    window_s: Annotated[float, Meta(gt=0)] = 60.0


class ProcessRow(Section, frozen=True):
    """One kind of process in a launch description. ``launch/train.yaml`` explains the keys."""

    module: str
    count: str | None = None
    when: str | None = None
    restart: RestartRule = RestartRule()
    ends_run: bool = False
    essential: bool = True
    environment: dict[str, str] = msgspec.field(default_factory=dict)


class Launch(Section, frozen=True):
    processes: dict[str, ProcessRow]
    evaluate: str


@dataclass(frozen=True)
class Process:
    """A process to start, with its name in the run."""

    name: str
    row: ProcessRow


def load(name: str) -> Launch:
    """Load a launch description. ``name`` is the path of a file, or the name of a shipped launch description.

    Raises:
        ConfigError: the launch description is missing or not valid.
    """
    file: Path = resources.find("launch", name)
    try:
        launch = msgspec.convert(resources.read_yaml(file.read_text(encoding="utf-8")), Launch)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"launch description {str(file)!r}: {' '.join(str(error).split())}") from None
    rows = {
        name: msgspec.structs.replace(row, module=_present(row.module, str(file)))
        for name, row in launch.processes.items()
    }
    launch = Launch(processes=rows, evaluate=_present(launch.evaluate, str(file)))
    for module in (launch.evaluate, *(row.module for row in rows.values())):
        if not _exists(module):
            raise ConfigError(f"launch description {str(file)!r}: there is no module {module!r}")
    if not any(row.ends_run for row in rows.values()):
        raise ConfigError(f"launch description {str(file)!r}: no process has ends_run, so the run would never end")
    return launch


def expand(launch: Launch, config: Config) -> list[Process]:
    """Return the processes that a configuration asks for. Raise ConfigError if a row names a wrong key."""
    processes: list[Process] = []
    for name, row in launch.processes.items():
        if row.when and not _value(config, row.when, name):
            continue
        if row.count is None:
            processes.append(Process(name, row))
        else:
            count = _value(config, row.count, name)
            if type(count) is not int:  # isinstance() would also accept a bool
                raise ConfigError(
                    f"launch description: count of process {name!r} is {row.count!r}; "
                    "allowed: a configuration key whose value is a whole number"
                )
            processes += [Process(f"{name}-{index}", row) for index in range(count)]
    return processes


@functools.cache
def _present(module: str, file: str) -> str:
    """Return the present name of a module. Warn once for each file and old name."""
    if module not in MOVED:
        return module
    log.warning("launch description %r: module %r is now %r; please write the new name", file, module, MOVED[module])
    return MOVED[module]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _value(config: Config, key: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, key.split("."), config)
    except AttributeError:
        text = f"launch description: process {name!r} names {key!r}, which is not a configuration key"
        raise ConfigError(text) from None
