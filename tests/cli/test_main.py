"""Test the tables of commands, benchmarks and ROS 2 nodes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

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


def interrupted(words: list[str], tmp_path: Path, package: str, code: str) -> tuple[int, str, str]:
    """Run a command with a module ``package`` that only runs ``code``. Returns exit code, stdout and stderr."""
    interrupting = tmp_path / "interrupting"
    interrupting.mkdir()
    (interrupting / f"{package}.py").write_text(f"import os, signal\n{code}\n")
    paths = os.pathsep.join([str(interrupting), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "td3_robot", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("package", ["numpy", "msgspec", "zmq"])
@pytest.mark.parametrize("words", [["train", "pendulum"], ["record", "out.mcap", "--config", "robot.yaml"]])
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.usefixtures("hangup")
def test_a_command_that_gets_a_signal_while_it_loads_modules_ends_without_a_traceback(
    words: list[str], package: str, number: str, tmp_path: Path
) -> None:
    """A module with the name of a package sends the signal while the command imports it."""
    code = 128 + getattr(signal, number)
    kill = f"os.kill(os.getpid(), signal.{number})"
    assert interrupted(words, tmp_path, package, kill) == (code, "", "")


def test_a_command_ends_without_a_traceback_if_a_package_turns_ctrl_c_into_an_import_error(tmp_path: Path) -> None:
    """The C code of numpy does this."""
    code = (
        "try: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: raise ImportError('no datetime') from None"
    )
    assert interrupted(["info", "x.mcap"], tmp_path, "numpy", code) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("hangup")
def test_a_signal_removes_the_incomplete_files_of_a_command(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the command has written a temporary file."""

    def write(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        assert len(list(tmp_path.iterdir())) == 1
        try:
            signal.raise_signal(number)
        finally:
            if number == signal.SIGHUP:  # a terminal that closes can send SIGHUP twice
                signal.raise_signal(number)
        raise AssertionError

    monkeypatch.setattr(Path, "write_bytes", write)
    before = signal.getsignal(number)
    assert main(["bundle", "create", "walker2d", str(tmp_path / "policy.safetensors")]) == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before
