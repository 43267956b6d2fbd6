"""The parser of all commands, the types of options with numbers, and the arguments that all nodes share."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.errors import EXIT_USAGE, RunFolderError, UsageError
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util.extras import COMPLETING
from td3_robot.util.text import NAME, NAME_RULE, did_you_mean, similar

POLICY_HELP = "a policy file, a run folder (its best policy, else its final one), or a shipped policy such as walker2d"
_ALLOWED = "; allowed: "
_LARGEST = 2**63 - 1  # default limit of whole numbers


class Parser(argparse.ArgumentParser):
    """An argument parser that prints errors as one line and keeps the line breaks of its epilog."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **named})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the arguments. If a shell asks for completions, answer and end the process."""
        if COMPLETING in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)
        parsed: argparse.Namespace = super().parse_args(args, namespace)
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown arguments here, so that the parser of a subcommand names its command and its options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument (\S+): is ", r"\1 is ", message)
        if wrong := re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", text):
            choices = wrong[3].replace("'", "").split(", ")
            text = f"{wrong[1]} is {wrong[2]!r}; {did_you_mean(wrong[2], choices, 'allowed:')}"
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", text)
        if unknown and (alike := similar(unknown[1], self._option_string_actions)):
            text = f"there is no option {unknown[1]}; did you mean {alike[0]}?"
        elif not wrong and _ALLOWED not in text:
            text += f"; see {self.prog} --help"
        self.exit(EXIT_USAGE, f"{self.prog}: {text}\n")


def integer(least: int = 0, most: int = _LARGEST) -> Callable[[str], int]:
    """Return the ``type`` of an option for whole numbers from ``least`` to ``most``. The type also accepts ``1e5``."""

    def parse(text: str) -> int:
        with contextlib.suppress(InvalidOperation):  # the text is not a number
            number = Decimal(text)
            if number.is_finite() and least <= number <= most and number == int(number):
                return int(number)
        limit = "" if most == _LARGEST else f" to {most}"
        raise _refused(text, f"whole numbers from {least}{limit}")

    return parse


def real(least: float = 0.0, *, above: bool = False, unit: str = "") -> Callable[[str], float]:
    """Return the ``type`` of an option for finite numbers from ``least``. With ``above``, exclude ``least`` itself."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):  # the text is not a number
            number = float(text)
            if math.isfinite(number) and (number > least or (number == least and not above)):
                return number
        limit = f"{least:g} {unit}".rstrip()
        raise _refused(text, f"above {limit}" if above else f"{limit} or more")

    return parse


def _refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    with contextlib.suppress(ValueError):
        float(text)
        return argparse.ArgumentTypeError(f"is {text}{_ALLOWED}{allowed}")
    return argparse.ArgumentTypeError(f"is {text[:40]!r}{_ALLOWED}{allowed}")


def node_parser(command: str, name: str, description: str, *, deployable: bool = False, epilog: str = "") -> Parser:
    """Make the parser of the arguments that every node takes.

    Args:
        command: the command with which a person starts the node. The node's errors and its help text show this command.
        name: default name of the node.
        description: what the node does.
        deployable: whether the node can start with a configuration instead of a run.
        epilog: examples for the help text.
    """
    epilog = epilog or f"example:\n  {command} --run runs/walker2d"
    result = Parser(prog=command, description=description, epilog=epilog)
    result.set_defaults(prog=command)
    result.add_argument("--run", type=Path, required=not deployable, metavar="DIR", help="folder of the run to join")
    if deployable:
        result.add_argument("--config", metavar="FILE", help="configuration of a node without a run")
        result.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key of FILE"
        )
    result.add_argument("--name", default=name, help=f"name in the run, unique among its processes (default: {name})")
    result.add_argument(
        "--incarnation",
        type=integer(most=2**64 - 1),
        default=int(time.time() * 1000),
        metavar="N",
        help="number of this start; must be higher than at earlier starts (default: the time in ms)",
    )
    return result


def add_index(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--index`` of a takeover."""
    parser.add_argument(
        "--index",
        type=integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="for a takeover: index of the robot in a simulator (default: %(default)s)",
    )


def check_name(option: str, name: str) -> None:
    """Check the name of a process. Raise UsageError if it is not allowed."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{option} is {name!r}; allowed: {NAME_RULE}")


def suggest(action: argparse.Action, names: Callable[[], Iterable[str]]) -> None:
    """Let the shell complete an argument with the given names and with the names of files."""

    def complete(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return [name for name in names() if name.startswith(prefix)] + list(FilesCompleter()(prefix))

    action.completer = complete  # type: ignore[attr-defined]


def policy_servers(arguments: argparse.Namespace, target: str = "") -> tuple[list[str], str | None]:
    """Return the endpoints of the policy servers that the arguments name, and the folder of the keys for them.

    Only a run on a cluster has several policy servers. There, ``target`` is the name of one of these servers, or
    of a source. The name of a source selects the server that answers this source.
    """
    run, config = run_or_config("policy", arguments)
    if run:
        return run.policy_servers(config, target), config.endpoints.keys
    if config.endpoints.policy is None:
        raise UsageError(f"--config {arguments.config!r}: the configuration sets no endpoints.policy")
    return [config.endpoints.policy], config.endpoints.keys


def run_or_config(role: str, arguments: argparse.Namespace) -> tuple[RunFolder | None, Config]:
    """Return the run that the arguments name (None without a run), and the configuration.

    ``--endpoint`` replaces a configuration file: it sets ``endpoints.ROLE``. ``role`` is the role of the node. A
    command such as ``td3-robot node`` is not a node: it passes "policy", the role of the server that it connects to.

    Raises:
        UsageError: the options contradict each other, name no run and no configuration, or name a missing file.
        RunFolderError, ConfigError: the run or the configuration cannot be read.
    """
    given = vars(arguments)
    run, config, endpoint, keys = (given.get(name) for name in ("run", "config", "endpoint", "keys"))
    overrides: Sequence[str] = given.get("overrides", ())
    if endpoint is not None:
        if config is not None or run is not None or overrides:
            raise UsageError("--endpoint cannot be combined with --run, --config or --set")
        return None, configuration.parse({"endpoints": {role: endpoint, "keys": keys}})
    if keys:
        raise UsageError("--keys needs --endpoint; a configuration names its keys in endpoints.keys")
    if (config is None) == (run is None):
        raise UsageError("give either --run DIR (to join a run) or --config FILE (for nodes without a run)")
    if config is not None:
        if not os.path.exists(config):
            raise UsageError(f"--config {config!r}: there is no such file")
        return None, configuration.load(config, overrides)
    if overrides:
        raise UsageError("--set needs --config: the configuration of a run is fixed")
    folder = open_run("--run", given["run"])
    return folder, folder.config()


def make_folder(option: str, folder: Path) -> None:
    """Make the folder that an option names, if it is missing.

    Raises:
        UsageError: a file has the place of the folder or of a folder above it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{option}: folder {str(folder)!r} cannot be made: {error.strerror}") from None


def open_run(option: str, folder: Path) -> RunFolder:
    """Open the run folder that an option names. If it holds no run, raise a RunFolderError that names the option."""
    try:
        return RunFolder.open(folder)
    except RunFolderError as error:
        raise RunFolderError(f"{option}: {error}") from None
