"""What ``td3-robot bench train`` reports; not how fast this machine happens to be."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from td3_robot_sims import bench_train

from td3_robot.cli import main as cli
from td3_robot.errors import EXIT_USAGE, NodeError
from td3_robot.learner import compute

TINY = ["--threads", "1", "--hidden", "8", "--batch", "4", "--no-compile"]


def test_real_trainings_beside_each_other(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With networks that cost nothing; standard output is the JSON and nothing else, whatever C code prints."""
    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    assert cli.main(["bench", "train", "--json", "--steps", "1000", "--rounds", "1", *TINY]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["benchmark"], report["task"], report["replay_ratio"]) == ("train", "Walker2D", 1)
    assert report["machine"]["packages"].keys() >= {"td3-robot", "pybullet", "stable-baselines3"}
    assert report["not_measured"] == {"bf16": "this processor has none"}
    theirs, mine = report["results"]
    assert [(row["kind"], row["threads"]) for row in (theirs, mine)] == [("sb3", 1), ("fp32", 1)]
    assert theirs["over_faster_sb3"] == 1
    assert mine["over_faster_sb3"] == pytest.approx(mine["steps_per_s"] / theirs["steps_per_s"])
    for row in (theirs, mine):
        assert 0 < row["lowest"] == row["steps_per_s"] == row["highest"]


def test_ratios_are_within_a_round_and_turns_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rounds; theirs 10 and 20 on one thread, 30 and 5 on two: the faster is 30, then 20."""
    speeds = {("sb3", 1): [10, 20], ("sb3", 2): [30, 5], ("fp32", 1): [60, 60], ("fp32", 2): [90, 20]}
    order: list[Any] = []

    def turn(kind: str, threads: int) -> float:
        order.append((kind, threads))
        return speeds[kind, threads][[item == (kind, threads) for item in order].count(True) - 1]

    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    monkeypatch.setattr(bench_train, "ours", lambda kind, threads, **_: turn(kind, threads))
    monkeypatch.setattr(bench_train, "stable_baselines3", lambda threads, **_: turn("sb3", threads))
    assert cli.main(["bench", "train", "--rounds", "2", "--no-compile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "not measured: bf16: this processor has none"
    assert lines[2:] == [
        "sb3   1 thread(s)     15.0 steps/s [10.0, 20.0]   0.67 × the faster sb3",  # 10/30 and 20/20
        "sb3   2 thread(s)     17.5 steps/s [5.0, 30.0]   0.62 × the faster sb3",  # 30/30 and 5/20
        "fp32  1 thread(s)     60.0 steps/s [60.0, 60.0]   2.50 × the faster sb3",  # 60/30 and 60/20
        "fp32  2 thread(s)     55.0 steps/s [20.0, 90.0]   2.00 × the faster sb3",  # 90/30 and 20/20
    ]
    assert order == [*speeds, *list(speeds)[1:], next(iter(speeds))]


def test_without_stable_baselines3_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "stable_baselines3" else found(name, *more)
    )
    monkeypatch.setattr(bench_train, "ours", lambda *_, **__: 1.0)
    assert cli.main(["bench", "train", "--rounds", "1", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_measured"]["sb3"] == "stable-baselines3 is not installed; pip install 'stable-baselines3>=2.6'"
    assert {row["over_faster_sb3"] for row in report["results"]} == {None}


def test_a_training_that_fails_says_why() -> None:
    with pytest.raises(NodeError, match=r"the training in fp31 failed: .*learner\.precision is 'fp31'"):
        bench_train.ours("fp31", threads=1, hidden=[8], batch=4, steps=1000)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "1500"], "--steps is 1500; it must be a multiple of 1000"),
        (["--threads", "1", "0"], "--threads is 0; it must be at least 1"),
        (["--hidden", "0"], "--hidden is 0; it must be at least 1"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "train", *arguments]) == EXIT_USAGE
    assert capsys.readouterr().err == f"td3-robot bench: {text}\n"
