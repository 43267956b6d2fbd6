"""The command-line arguments that all nodes share. They name a run, or a configuration to deploy with."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any, NoReturn

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.errors import EXIT_USAGE, UsageError
from td3_robot.runtime.run_folder import RunFolder


class Parser(argparse.ArgumentParser):
    """An argument parser that prints errors as one line and keeps the line breaks of its epilog."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **named})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def node_parser(role: str, name: str, description: str, *, deployable: bool = False, epilog: str = "") -> Parser:
    """Make the parser of the arguments that every node takes.

    Args:
        role: role of the node, and its command: ``td3-robot ROLE``.
        name: default name of the node in the run.
        description: what the node does.
        deployable: whether the node can start with a configuration instead of a run.
        epilog: examples for the help text.
    """
    result = Parser(
        prog=f"td3-robot {role}",
        description=description,
        epilog=epilog or f"example:\n  td3-robot {role} --run runs/walker2d",
    )
    result.add_argument("--run", type=Path, required=not deployable, metavar="DIR", help="folder of the run to join")
    if deployable:
        result.add_argument("--config", metavar="FILE", help="configuration to deploy with, without a run")
        result.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key of FILE"
        )
    result.add_argument(
        "--name", default=name, help="name in the run, unique among its processes (default: %(default)s)"
    )
    result.add_argument(
        "--incarnation",
        type=_incarnation,
        default=int(time.time() * 1000),
        metavar="N",
        help="number of this start; must be higher than at earlier starts (default: the time in ms)",
    )
    return result


def _incarnation(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 64):
        raise argparse.ArgumentTypeError(f"{text!r} is not an incarnation; allowed: 0 to {(1 << 64) - 1}")
    return int(text)


def check_name(option: str, name: str) -> None:
    """Check the name of a process; raise UsageError if it is not allowed."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise UsageError(f"{option} is {name!r}; allowed: 1 to 64 letters, digits, '_', '-' and '.'")


def run_or_config(role: str, arguments: argparse.Namespace) -> tuple[RunFolder | None, Config]:
    """Open the run, or read the configuration, that the arguments name.

    ``--endpoint`` replaces a configuration file. It sets the endpoint of the link that the role serves.

    Returns:
        The run and its configuration; without a run, None and the configuration.

    Raises:
        UsageError: the arguments name no run and no configuration, or more than one of them.
        RunFolderError, ConfigError: the run or the configuration cannot be read.
    """
    config, endpoint = getattr(arguments, "config", None), getattr(arguments, "endpoint", None)
    if endpoint is not None:
        if config is not None or arguments.run is not None or arguments.overrides:
            raise UsageError("--endpoint cannot be combined with --run, --config or --set")
        return None, configuration.parse({"endpoints": {role: endpoint, "keys": arguments.keys}})
    if getattr(arguments, "keys", None):
        raise UsageError("--keys needs --endpoint; a configuration names its keys in endpoints.keys")
    if (config is None) == (arguments.run is None):
        raise UsageError("give one of --run DIR (join a run) and --config FILE (deploy without a run)")
    if config is not None:
        return None, configuration.load(config, arguments.overrides)
    if getattr(arguments, "overrides", None):
        raise UsageError("--set needs --config: the configuration of a run is fixed")
    run = RunFolder.open(arguments.run)
    return run, run.config()
