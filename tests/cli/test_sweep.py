"""``td3-robot sweep``: its arguments, and a real sweep that is stopped and continued."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.cli import sweep
from td3_robot.cli.main import main
from tests.conftest import Command


@pytest.mark.parametrize(
    ("text", "expected"), [("0..3", [0, 1, 2, 3]), ("7", [7]), ("1,5,7", [1, 5, 7]), ("4..4", [4])]
)
def test_seeds_are_read(text: str, expected: list[int]) -> None:
    assert sweep.seeds(text) == expected


@pytest.mark.parametrize("text", ["", "3..1", "1,1", "a", "1..b", "-1", "1,,2", "4294967296"])  # the last is 2**32
def test_wrong_seeds_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"allowed: FIRST\.\.LAST"):
        sweep.seeds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learner.n_step=1,3", ("learner.n_step", ["1", "3"])),
        ("network.hidden=[64,64],[32]", ("network.hidden", ["[64,64]", "[32]"])),
        ("task=Ant", ("task", ["Ant"])),
    ],
)
def test_variations_are_read(text: str, expected: tuple[str, list[str]]) -> None:
    assert sweep.variation(text) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "3..1"], "--seeds is '3..1'; allowed: FIRST..LAST"),
        (["--vary", "learner.n_step"], "--vary is 'learner.n_step'; allowed: KEY=A,B"),
        (["--vary", "learner.n_step=1,1"], "with different values"),
        (["--vary", "seed=1,2"], "seed is set twice, or by the wrong option; allowed: --seeds"),
        (["--vary", "learner.n_step=1,2", "--set", "learner.n_step=3"], "learner.n_step is set twice"),
        (["--vary", "learner.nstep=1,2"], "unknown key 'learner.nstep'"),
        (["--vary", "evaluation.every=100,0"], "evaluation.every is 0, but a sweep compares final evaluations"),
        (["--at-once", "0"], "--at-once is 0; allowed: whole numbers from 1"),
    ],
)
def test_each_mistake_is_named_before_a_run_begins(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "pendulum", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("td3-robot sweep: ")
    assert words in error
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_stopped_sweep_continues(command: Callable[..., Command], tmp_path: Path) -> None:
    """The sweep has four runs: two values of ``learner.n_step``, and two seeds for each value.

    Ctrl-C comes after the first run.
    """
    sets = (
        *("learner.learning_starts=100", "learner.batch_size=16", "learner.precision=fp32", "learner.compile=false"),
        *("network.hidden=[8]", "evaluation.every=200", "evaluation.episodes=1", "learner.publish_every=50"),
    )
    words = [word for item in sets for word in ("--set", item)]
    arguments = ("sweep", "pendulum", "--seeds", "0..1", "--vary", "learner.n_step=1,3", "--steps", "400", "--out", "s")
    first = command(*arguments, *words, "--at-once", "1")
    first.wait_for(r"^1/4 n_step=1-seed0: mean return -")
    first.interrupt()
    assert first.finish() == 130, first.output()
    assert "the same command continues" in first.output()

    second = command(*arguments, *words)
    assert second.finish() == 0, second.output()
    assert "1 of 4 runs are finished already" in second.output()
    with (tmp_path / "s" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ["n_step=1-seed0", "n_step=1-seed1", "n_step=3-seed0", "n_step=3-seed1"]
    assert [row["run"] for row in rows] == names
    assert {row["env_steps"] for row in rows} == {"400"}
    means = [float(row["mean_return"]) for row in rows]
    table = next(line for line in second.lines if line.startswith("learner.n_step=3"))
    assert table.split()[1:] == ["2", f"{sum(means[2:]) / 2:.1f}", f"{min(means[2:]):.1f}", f"{max(means[2:]):.1f}"]
    assert (tmp_path / "s" / "sweep.png").read_bytes().startswith(b"\x89PNG")

    third = command(*arguments, *words)
    assert third.finish() == 0, third.output()
    assert "4 of 4 runs are finished already" in third.output()
