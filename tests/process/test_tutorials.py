"""Run the blocks of the tutorials, in order, in a folder that holds only the pendulum files of ``examples/``.

A ``sh`` block runs in bash; all such blocks of a page share one shell. A block with a title is written to
the file that the title names. The test skips other blocks, such as ``console`` blocks for commands that take long.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from td3_robot.config import loading as configuration
from tests.process.conftest import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FOR_BUSY_MACHINES = {
    "sleep 32": "sleep 60",
    "sleep 200": "sleep 300",
    "td3-robot node ": "td3-robot node --timeout 60 ",
    "deadline_ms: 200": "deadline_ms: 2000",
    "deadline_ms: 500": "deadline_ms: 2000",
    "hang_ms: 500": "hang_ms: 5000",
    "hang_ms: 1000": "hang_ms: 5000",
}
"""More time for drives and answers, and longer deadlines, because other tests run at the same time."""
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def script_of(page: str) -> str:
    """Return the page's blocks as one bash script that stops at the first failure."""
    parts = ["set -euo pipefail"]
    for language, title, text in BLOCK.findall(page):
        if title:
            file = shlex.quote(title)
            parts += [f"mkdir -p $(dirname {file})", f"cat > {file} <<'END_OF_BLOCK'\n{text}END_OF_BLOCK"]
        elif language == "sh":
            parts += ["set -x", text, "{ set +x; } 2>/dev/null"]
    return "\n".join(parts)


def patient(text: str) -> str:
    for words, longer in FOR_BUSY_MACHINES.items():
        text = text.replace(words, longer)
    return text


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_all_sh_blocks_of_the_tutorial_succeed(tmp_path: Path, page: Path) -> None:
    for example in (ROOT / "examples").glob("pendulum*"):
        (tmp_path / example.name).write_text(patient(example.read_text()))
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    log = tmp_path / "output.log"  # not a pipe, because background processes would keep a pipe open
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", patient(script_of(page.read_text(encoding="utf-8")))],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=1500)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ends background processes of the page
    assert code == 0, log.read_text(errors="replace")[-5000:]


def test_each_text_for_busy_machines_occurs_in_a_page_or_an_example() -> None:
    files = [*TUTORIALS, *(ROOT / "examples").glob("pendulum*")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [words for words in FOR_BUSY_MACHINES if words not in text] == []


def test_the_learner_of_a_robot_saves_a_checkpoint_long_before_the_drive_ends() -> None:
    """Without a checkpoint, a learner that starts again would send the robot the policy in ``start_from``."""
    config = configuration.load(ROOT / "examples" / "pendulum_learner.yaml")
    page = (ROOT / "docs" / "tutorials" / "adapt.md").read_text(encoding="utf-8")
    drive = re.search(r"^sleep (\d+)$", page, re.MULTILINE)
    assert drive
    assert 0 < config.checkpoint.every <= 50 * int(drive[1]) / 5  # 50 Steps per second


def test_script_of_a_page_contains_commands_and_files_in_order() -> None:
    page = (
        "```sh\necho a\n```\n\n```console\n$ never\n```\n\n"
        '```python title="x/y.py"\nprint(1)\n```\n\n```sh\necho b\n```\n'
    )
    script = script_of(page)
    assert "never" not in script
    assert script.index("echo a") < script.index("cat > x/y.py") < script.index("echo b")
