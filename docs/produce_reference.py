"""The produced parts of the pages about configuration, commands and robots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from td3_robot_sims import tasks
from td3_robot_sims.tables import table as robot_table

from td3_robot.cli.verbs import COMMANDS
from td3_robot.config import reference


def robots() -> str:
    """Return the tables of all shipped robots."""
    return "\n".join(robot_table(tasks.spec(name)) for name in tasks.names()).rstrip()


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
    # Plain text of a fixed width, whatever the terminal is.
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
