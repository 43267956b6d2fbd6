"""The benchmark benchmarks/faults.py: its cells, its table on a page, and some of its functions.

A cell is a combination of a fault, a process and a use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from td3_robot.errors import NodeError

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_shows_the_matrix_from_faults_json(tmp_path: Path) -> None:
    import reliability

    page = tmp_path / "page.md"
    page.write_text(reliability.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    reliability.write_faults(page=page)
    assert page.read_text(encoding="utf-8") == reliability.PAGE.read_text(encoding="utf-8")


def test_every_cell_is_measured_or_left_out_or_not_run() -> None:
    """The matrix has 7 faults, 6 processes and 3 uses."""
    import faults
    import reliability

    report = json.loads((reliability.DATA / "faults.json").read_text())
    assert len({*report["cells"], *report["left_out"], *report["not_run"]}) == 7 * 6 * 3
    for cell in report["left_out"]:
        fault, process, use = cell.split("/")
        assert faults.left_out((fault, process, use)) == report["left_out"][cell]


@pytest.mark.parametrize("cell", ["kill/policy/nowhere", "kill"])
def test_unknown_cell_is_refused(tmp_path: Path, cell: str) -> None:
    done = run("--only", cell, "--out", str(tmp_path / "out.json"))
    assert done.returncode == 2
    assert f"--only is ['{cell}']; no cell matches it" in done.stderr


def test_cells_of_another_machine_are_not_mixed_with_new_cells(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    other = {"machine": {"processor": "Abacus", "cores": 1}, "cells": {"stop/policy/deploy": {}}}
    out.write_text(json.dumps(other))
    done = run("--only", "kill/policy/deploy", "--out", str(out))
    assert done.returncode == 2
    assert "out.json was measured on Abacus, 1 cores; this machine is " in done.stderr
    assert json.loads(out.read_text()) == other


def test_a_gap_counts_even_if_it_begins_before_the_fault_or_lasts_until_the_measurement_ends() -> None:
    """Messages come at 1, 2, 6 and 7 s. The fault comes at 0, 3, 6 or 8 s.

    A measurement that ends at 7 s has no gap after the last message. A measurement that ends at 12 s has a gap from 7
    to 12 s.
    """
    from faults_injected import longest_gap

    def gaps(until: int) -> list[float | None]:
        return [longest_gap(times, since * 10**9, until * 10**9) for since in (0, 3, 6, 8)]

    times = [second * 10**9 for second in (1, 2, 6, 7)]
    assert gaps(7) == [4.0, 4.0, 1.0, None]
    assert gaps(12) == [5.0] * 4
    assert longest_gap([], 0, 10**9) is None


class Still:
    """A robot that moves only before the fault: at 1 s on the monotonic clock."""

    end = run = ended = staticmethod(lambda *_: False)

    def __init__(self, *_: Any) -> None:
        self._moves = True

    def wait_for_policy(self, moment: float, timeout: float) -> None:
        del moment
        if not self._moves:
            raise NodeError(f"no action of the policy within {timeout:g} s")
        self._moves = False

    def applied(self) -> list[tuple[float, float]]:
        return [(1.0, 0.5)]


def test_if_a_robot_never_moves_again_the_note_of_the_cell_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fault_robot

    monkeypatch.setattr(fault_robot, "Robot", Still)
    monkeypatch.setattr(fault_robot, "_inject", lambda _: None)
    monkeypatch.setattr(fault_robot, "read", lambda _: ({"action": [10**9]}, 0))
    cell = fault_robot.deploy("kill", "policy", tmp_path, 0)
    assert (cell["safe_s"], cell["robot_goes_on_s"]) == (None, None)
    assert cell["note"] == "no action of the policy within 40 s"
    # The gap begins at the last message, which came 1 s after 1970 began. It lasts until now.
    assert cell["goes_on_s"] > 10**9 - 1


@pytest.mark.slow
def test_a_robot_is_safe_until_a_killed_policy_server_is_back(tmp_path: Path) -> None:
    """The deadline of the driver is 500 ms. If the server is back earlier, the driver applies no safe action."""
    done = run("--quick", "--only", "kill/policy/deploy", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    cell = json.loads((tmp_path / "out.json").read_text())["cells"]["kill/policy/deploy"]
    assert "failed" not in cell
    assert cell["missing_in_recording"] == 0
    safe, moves_again = cell["safe_s"], cell["robot_goes_on_s"]
    assert moves_again > 0
    assert safe < moves_again if safe else moves_again < 0.7  # the deadline and a margin of 200 ms


def run(*words: str) -> Any:
    command = [sys.executable, str(SCRIPTS / "faults.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_leaking_process_fails_when_it_needs_memory(tmp_path: Path) -> None:
    """The environment variable LEAK names a file. The process runs until this file contains the ID of the process.

    Then ``benchmarks/leak`` sets a memory limit and takes all memory up to this limit, so that the process fails.
    """
    (tmp_path / "leaking").write_text("0")
    program = "import time\nprint('ready', flush=True)\nwhile True:\n    bytearray(1 << 20)\n    time.sleep(0.001)\n"
    environment = {**os.environ, "LEAK": str(tmp_path / "leaking"), "PYTHONPATH": str(SCRIPTS / "leak")}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) as it:
        try:
            assert it.stdout
            assert it.stdout.readline() == "ready\n"
            (tmp_path / "leaking").write_text(str(it.pid))
            assert it.wait(60) != 0
        finally:
            it.kill()
