"""The report of ``td3-robot bench sim``. No test checks the speed, because it depends on the machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from td3_robot_sims import bench_sim as bench

from td3_robot.bench import harness
from td3_robot.cli import main as cli
from td3_robot.cli.bench import BENCHMARKS
from td3_robot.errors import EXIT_USAGE
from td3_robot.util.machine import available_cores


def test_the_report_has_the_machine_the_robots_the_fleets_and_the_memory() -> None:
    """The benchmark runs in a child process.

    In the tests' process, robots could use memory that earlier tests freed. Then the reported memory would be too low.
    """
    words = ["-m", "td3_robot", "bench", "sim", "--json", "--steps", "20", "--rounds", "2", "--resets", "3"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert (report["benchmark"], report["steps_per_block"], report["rounds"]) == ("sim", 20, 2)
    computer = report["machine"]
    assert computer["cores"] >= 1
    assert computer["processor"]
    assert computer["packages"].keys() == {"td3-robot", "pybullet", "numpy"}
    for part in ("memory", "one_robot", "fleet"):
        assert report[part].keys() == {"Walker2D", "Ant"}
    for task in ("Walker2D", "Ant"):
        assert report["one_robot"][task].keys() == {"td3_robot"}
        assert report["fleet"][task].keys() == {"1", "4", "16"}
        fleets = report["fleet"][task].values()
        assert all(row["td3_robot_over_one_robot"] > 0 for row in fleets)
        assert report["fleet"][task]["1"]["td3_robot_over_one_robot"] == 1
        assert [row["threads"] for row in fleets] == [min(size, available_cores()) for size in bench.FLEETS]
        for row in [report["one_robot"][task]["td3_robot"], *(row["td3_robot"] for row in fleets)]:
            assert 0 < row["lowest"] <= row["steps_per_s"] <= row["highest"]
        used = report["memory"][task]
        assert used["resets"] == 3
        if sys.platform == "linux":
            assert 0 < used["bytes_per_robot"] < 100e6


def test_text_has_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--steps", "2", "--rounds", "1", "--resets", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # One line shows the machine. For each of the two tasks, one line shows one robot, three lines show fleets, and on
    # Linux one line shows the memory.
    assert len(lines) == 1 + 2 * (1 + 3 + (sys.platform == "linux"))
    assert all("steps/s" in line or "MB" in line for line in lines[1:])


def test_the_warm_up_does_not_count_and_each_round_begins_with_another_contestant() -> None:
    order: list[str] = []
    contestants = {name: (lambda name=name: order.append(name)) for name in "abc"}
    results = harness.take_turns(contestants, 2, warm_up=True)
    assert "".join(order) == "cab" + "abc" + "bca"
    assert {name: len(times) for name, times in results.items()} == {"a": 2, "b": 2, "c": 2}


def test_summary_has_the_median_and_the_range() -> None:
    assert harness.summary("steps_per_s", [5.0, 10.0, 2.0]) == {
        "steps_per_s": 5.0,
        "lowest": 2.0,
        "highest": 10.0,
        "rounds": [5.0, 10.0, 2.0],
    }


def test_wrong_arguments_give_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sim", "--rounds", "0"]) == EXIT_USAGE
    assert capsys.readouterr().err == "td3-robot bench sim: --rounds is 0; allowed: whole numbers from 1\n"


def test_a_word_in_place_of_a_number_gives_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sim", "--steps", "many"]) == EXIT_USAGE
    assert capsys.readouterr().err == "td3-robot bench sim: --steps is 'many'; allowed: whole numbers from 1\n"


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in BENCHMARKS)
