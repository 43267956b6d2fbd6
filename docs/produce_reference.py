"""The produced parts of the pages about configuration, commands and robots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from td3_robot_sims import tasks

from td3_robot.cli.verbs import COMMANDS
from td3_robot.config import reference
from td3_robot.specs import Channel, RobotSpec


def robots() -> str:
    """Return the tables of all shipped robots."""
    return "\n".join(line for name in tasks.names() for line in _robot(tasks.spec(name))).rstrip()


def _robot(spec: RobotSpec) -> Iterable[str]:
    """Return a heading, a table of observations and a table of actions."""
    period = f"{spec.control_period * 1000:g} ms ({1 / spec.control_period:.1f} Hz)"
    sizes = f"{spec.observation_size} observations, {spec.action_size} actions, one step every {period}."
    tables = [*_channels("observation", spec.observations), "", *_channels("action", spec.actions), ""]
    return [f"## {spec.name}", "", sizes, "", *tables]


def _channels(kind: str, channels: Sequence[Channel]) -> Iterable[str]:
    yield f"| # | {kind} | unit | low | high | meaning |"
    yield "|--:|---|---|--:|--:|---|"
    for index, channel in enumerate(channels):
        yield _row(
            str(index), f"`{channel.name}`", channel.unit, f"{channel.low:g}", f"{channel.high:g}", channel.meaning
        )


def keys() -> str:
    """Return a table of configuration keys for each section."""
    parts = []
    for section, rows in groupby(reference.all_keys(), lambda key: key.name.rpartition(".")[0]):
        parts.append(f"## `{section}`\n" if section else "## Top level\n")
        parts.append("| key | type | default | allowed | meaning |\n|---|---|---|---|---|")
        parts += [_row(f"`{key.name}`", key.type, f"`{key.default}`", key.allowed, key.doc) for key in rows]
        parts.append("")
    return "\n".join(parts).rstrip()


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def commands() -> str:
    """Return the help text of every command."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(_help, [[], *([name] for name in COMMANDS)])
    return "\n\n".join(_section(name, text) for name, text in zip(["td3-robot", *COMMANDS], texts, strict=True))


def _help(words: Iterable[str]) -> str:
    # These variables give plain text of a fixed width on every terminal.
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    command = [sys.executable, "-m", "td3_robot", *words, "--help"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _section(name: str, text: str) -> str:
    return f"## {name}\n\n```text\n{text.rstrip()}\n```"


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "reference/robots.md": {"robots": robots},
    "reference/configuration.md": {"keys": keys},
    "reference/command_line.md": {"commands": commands},
}
