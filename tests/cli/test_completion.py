"""Shell completion of command lines. The tests set the same environment variables as argcomplete's shell functions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


@pytest.fixture
def completions(tmp_path: Path) -> Callable[[str], set[str]]:
    """Returns a function that gives the shell's completions of a command line. The cursor is at the end of the line."""

    def complete(line: str) -> set[str]:
        answer = tmp_path / "answer"
        environment = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        command = [sys.executable, "-m", "td3_robot.cli.main"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        return {word.strip() for word in answer.read_text().splitlines()}

    return complete


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("td3-robot re", {"record", "replay", "recover"}),
        ("td3-robot train --st", {"--steps"}),
        ("td3-robot train walker2d_f", {"walker2d_fast"}),
        ("td3-robot train --task Half", {"HalfCheetah"}),
        ("td3-robot train --set learner.batch", {"learner.batch_size="}),
        ("td3-robot eval walk", {"walker2d", "walking.safetensors"}),
        ("td3-robot eval ant --task Half", {"HalfCheetah"}),
        ("td3-robot list a", {"algorithms"}),
        ("td3-robot bundle ver", {"verify"}),
        ("td3-robot node est", {"estop"}),
        ("td3-robot bench le", {"learner"}),
        ("td3-robot bench learner --rep", {"--repetitions"}),
        ("td3-robot ros2 dri", {"driver"}),
        ("td3-robot ros2 driver --conf", {"--config"}),
    ],
)
def test_commands_options_and_names_are_completed(
    line: str, offered: set[str], completions: Callable[[str], set[str]], tmp_path: Path
) -> None:
    (tmp_path / "walking.safetensors").write_text("")
    assert completions(line) == offered
