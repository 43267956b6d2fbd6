"""The produced parts of the pages about configuration, commands and robots."""

from __future__ import annotations

import os
import re
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
    """Return the help text of every command and subcommand."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        whole, *texts = pool.map(_help, [[], *([name] for name in COMMANDS)])
        sections = [_section("##", "td3-robot", whole)]
        for name, text in zip(COMMANDS, texts, strict=True):
            parts = [[name, part] for part in _parts(text)]
            sections.append(_section("##", name, text))
            sections += map(_section, ["###"] * len(parts), map(" ".join, parts), pool.map(_help, parts))
    return "\n\n".join(sections)


def _parts(text: str) -> list[str]:
    """Return the names of a command's subcommands, from its help text."""
    _, found, rest = text.partition("\n  COMMAND\n")
    if found:
        return re.findall(r"^    (\S+)", rest.partition("\n\n")[0], re.MULTILINE)
    lists = re.findall(r"^(?:benchmarks|nodes):\n((?:  .*\n)+)", text, re.MULTILINE)
    return re.findall(r"^  (\S+)", "".join(lists), re.MULTILINE)


def _help(words: Iterable[str]) -> str:
    # These variables give plain text of a fixed width on every terminal.
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    command = [sys.executable, "-m", "td3_robot", *words, "--help"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _section(level: str, name: str, text: str) -> str:
    return f"{level} {name}\n\n```text\n{text.rstrip()}\n```"


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "reference/robots.md": {"robots": robots},
    "reference/configuration.md": {"keys": keys},
    "reference/command_line.md": {"commands": commands},
}
