"""Test the tables of commands, benchmarks and ROS 2 nodes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from itertools import groupby

import pytest

from td3_robot.cli.bench import BENCHMARKS
from td3_robot.cli.main import main
from td3_robot.cli.ros2 import NODES
from td3_robot.cli.verbs import COMMANDS, Verb
from td3_robot.errors import EXIT_GOOD, EXIT_USAGE


@pytest.mark.parametrize("table", [COMMANDS, BENCHMARKS, NODES])
def test_every_row_names_a_function(table: Mapping[str, Verb]) -> None:
    for verb in table.values():
        module, _, function = verb.place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_help_lists_every_command_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == EXIT_GOOD
    lines = capsys.readouterr().out.splitlines()
    for group, rows in groupby(COMMANDS.items(), lambda row: row[1].group):
        for place, (name, verb) in enumerate(rows, lines.index(f"{group}:") + 1):
            assert lines[place].split(maxsplit=1) == [name, verb.purpose]


def test_commands_of_one_group_are_listed_together() -> None:
    groups = [group for group, _ in groupby(verb.group for verb in COMMANDS.values())]
    assert len(groups) == len(set(groups))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["traim"], "td3-robot: unknown command 'traim'; did you mean 'train'?"),
        (
            ["bench"],
            "td3-robot bench: no benchmark given; "
            "allowed: policy, link, sim, learner, train, record, replay, conformance",
        ),
        (["ros2"], "td3-robot ros2: no node given; allowed: driver, operator, monitor"),
        (["ros2", "drive"], "td3-robot ros2: unknown node 'drive'; did you mean 'driver'?"),
        (["bench", "simm"], "td3-robot bench: unknown benchmark 'simm'; did you mean 'sim'?"),
    ],
)
def test_an_unknown_or_missing_name_is_a_usage_error_of_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == EXIT_USAGE
    assert capsys.readouterr().err == f"{text}\n"
