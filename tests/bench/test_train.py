"""The report of ``td3-robot bench train``. No test checks the speed, because it depends on the machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from td3_robot.bench import train
from td3_robot.cli import main as cli
from td3_robot.errors import EXIT_USAGE, NodeError
from td3_robot.learner import compute

TINY = ["--threads", "1", "--hidden", "8", "--batch", "4", "--no-compile"]


@pytest.mark.slow
def test_the_report_of_a_real_training_has_consistent_speeds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Standard output holds only the JSON."""
    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    assert cli.main(["bench", "train", "--json", "--steps", "1000", "--rounds", "1", *TINY]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["benchmark"], report["task"], report["replay_ratio"]) == ("train", "Walker2D", 1)
    assert report["machine"]["packages"].keys() >= {"td3-robot", "pybullet"}
    assert report["not_measured"] == {"bf16": "this processor has none"}
    (row,) = report["results"]
    assert (row["kind"], row["threads"]) == ("fp32", 1)
    assert 0 < row["lowest"] == row["steps_per_s"] == row["highest"]


def test_contestants_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {1: [60, 60], 2: [90, 20]}
    order: list[int] = []

    def turn(*_: Any, threads: int, **__: Any) -> float:
        order.append(threads)
        return speeds[threads][order.count(threads) - 1]

    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    monkeypatch.setattr(train, "ours", turn)
    assert cli.main(["bench", "train", "--rounds", "2", "--no-compile"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "not measured: bf16: this processor has none",
        "fp32  1 thread(s)     60.0 steps/s [60.0, 60.0]",
        "fp32  2 thread(s)     55.0 steps/s [20.0, 90.0]",
    ]
    assert order == [1, 2, 2, 1]


def test_error_of_a_failed_training_names_the_cause() -> None:
    with pytest.raises(NodeError, match=r"the training in fp31 failed: .*learner\.precision is 'fp31'"):
        train.ours("fp31", threads=1, hidden=[8], batch=4, steps=1000)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "1500"], "--steps is 1500; it must be a multiple of 1000"),
        (["--threads", "1", "0"], "--threads is 0; allowed: whole numbers from 1"),
        (["--hidden", "0"], "--hidden is 0; allowed: whole numbers from 1"),
    ],
)
def test_wrong_arguments_give_one_line_of_error(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "train", *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.endswith(f": {text}\n")
    assert error.count("\n") == 1
