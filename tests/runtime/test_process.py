"""A node as a process: the exit code and the last words of a node that fails."""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

import pytest

from td3_robot.runtime import process
from td3_robot.runtime.node import Node


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Arguments of a node with a small configuration."""
    monkeypatch.setattr(process, "_catch_signals", lambda _: None)  # pytest handles the signals
    file = tmp_path / "robot.yaml"
    file.write_text(f"endpoints: {{policy: 'ipc://{tmp_path}/policy'}}")
    return argparse.Namespace(run=None, config=str(file), name="monitor", incarnation=1)


def test_the_last_line_of_a_crash_has_the_whole_error(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor shows the last line of a process's log."""

    def fail(_: Node) -> None:
        raise ValueError("my update fails\n  for two reasons")

    assert process.run_node("monitor", options, fail) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: my update fails for two reasons"


def test_an_exit_of_the_users_code_is_a_crash(options: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    """The supervisor must not see exit code 0: the training has not ended."""

    def leave(_: Node) -> None:
        sys.exit()

    assert process.run_node("learner", options, leave) == 1
    first, *middle, last = capsys.readouterr().err.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "SystemExit")
    assert any("sys.exit()" in line for line in middle)


def test_the_program_of_a_driver_may_end_itself(options: argparse.Namespace) -> None:
    def leave(_: Node) -> None:
        sys.exit(7)

    with pytest.raises(SystemExit, match="7"):
        process.run_node("driver", options, leave)


@pytest.mark.parametrize("prog", [{"prog": "td3-robot monitor"}, {}])
@pytest.mark.parametrize(
    ("module", "code", "last"),
    [
        (
            "foxglove.schemas",
            2,
            "{who}: needs foxglove.schemas, which is not installed; pip install 'td3-robot[foxglove]'",
        ),
        ("my_own_module", 1, "ModuleNotFoundError: No module named 'my_own_module'"),
    ],
)
def test_a_missing_package_of_an_extra_is_an_error_of_one_line(
    module: str,
    code: int,
    last: str,
    prog: dict[str, str],
    options: argparse.Namespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A module that belongs to no extra is a bug, so the node prints the traceback."""

    def fail(_: Node) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    assert process.run_node("monitor", argparse.Namespace(**vars(options), **prog), fail) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == last.format(who=prog.get("prog", "monitor"))
    assert len(lines) == 1 or code == 1


def test_on_a_full_disk_the_advice_is_the_command_of_the_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "_catch_signals", lambda _: None)  # pytest handles the signals
    (tmp_path / "config.yaml").write_text("endpoints: {learner: ipc://learner}")

    def fail(_: Node) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    options = argparse.Namespace(run=tmp_path, name="learner", incarnation=1, prog="td3-robot learner")
    assert process.run_node("learner", options, fail) == 1
    assert capsys.readouterr().err == (
        "td3-robot learner: metrics.jsonl: No space left on device; "
        f"make room on that disk, then run td3-robot learner --run {tmp_path}\n"
    )
