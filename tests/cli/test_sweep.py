"""``td3-robot sweep``: its arguments, and a real sweep that is stopped and continued."""

from __future__ import annotations

import argparse
import csv
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from td3_robot.cli import sweep
from td3_robot.cli.main import main
from td3_robot.config import loading as configuration
from td3_robot.runtime.prepare import with_policy_file
from td3_robot.runtime.run_folder import RunFolder
from tests.conftest import Command


@pytest.mark.parametrize(
    ("text", "expected"), [("0..3", [0, 1, 2, 3]), ("7", [7]), ("1,5,7", [1, 5, 7]), ("4..4", [4])]
)
def test_seeds_are_read(text: str, expected: list[int]) -> None:
    assert sweep.seeds(text) == expected


def test_a_sweep_has_at_most_1000_seeds() -> None:
    assert len(sweep.seeds("0..999")) == 1000
    for text in ("0..1000", "0..99999999999", f"0..{10**30}", ",".join(map(str, range(1001)))):
        with pytest.raises(argparse.ArgumentTypeError, match=r"; at most 1,000 seeds$"):
            sweep.seeds(text)


@pytest.mark.parametrize("text", ["", "3..1", "1,1", "a", "1..b", "-1", "1,,2", "4294967296"])  # the last is 2**32
def test_wrong_seeds_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"allowed: FIRST\.\.LAST"):
        sweep.seeds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learner.n_step=1,3", ("learner.n_step", ["1", "3"])),
        ("network.hidden=[64,64],[32]", ("network.hidden", ["[64,64]", "[32]"])),
        ("key=[[1,2],[3]],[4]", ("key", ["[[1,2],[3]]", "[4]"])),
        ("exploration={noise: 1, theta: 2},{noise: 3}", ("exploration", ["{noise: 1, theta: 2}", "{noise: 3}"])),
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
        (["--vary", "learner.n_step=1,2", "--set", "learner={n_step: 3}"], "learner.n_step is set twice"),
        (["--vary", "learner.nstep=1,2"], "sweep: --vary learner.nstep=1: unknown key 'learner.nstep'"),
        (["--vary", "robots=1,0"], "sweep: --vary robots=0: robots is 0; it must be a whole number >= 1"),
        (["--steps", "400"], "sweep: --steps: learner.learning_starts is 1000 and total_steps is 400"),
        (["--set", "robots=0"], "sweep: --set robots=0: robots is 0; it must be"),
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


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["learner.n_step", "learner.batch_size"], "n_step=1-batch_size=1-seed0"),
        (["exploration.noise", "network.hidden", "a.noise"], "exploration.noise=1-hidden=1-a.noise=1-seed0"),
        (
            ["randomization.sensor_noise.all", "randomization.sensor_bias.all"],
            "sensor_noise.all=1-sensor_bias.all=1-seed0",
        ),
        (["policy", "learner.policy"], "policy=1-learner.policy=1-seed0"),
    ],
)
def test_the_name_of_a_run_tells_its_keys_apart(keys: list[str], words: str) -> None:
    options = argparse.Namespace(vary=[(key, ["1"]) for key in keys], overrides=[], seeds=[0])
    assert [training.name for training in sweep._trainings(options)] == [words]


def finish(run: Path, *overrides: str) -> None:
    """Make the folder of a finished run of Pendulum. The final evaluation has a mean return of -5."""
    folder = RunFolder.create(run, configuration.load("pendulum", ["total_steps=2000", *overrides]))
    record = {"kind": "evaluation", "env_steps": 2000, "updates": 1, "eval_return_mean": -5.0, "eval_return_std": 0.0}
    folder.metrics_file.write_text(json.dumps({**record, "final": True}) + "\n")


COMMAND = ["sweep", "pendulum", "--vary", "learner.batch_size=32,64", "--steps", "2000", "--out", "s"]


def test_finished_runs_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration asks for the precision ``auto`` in both commands. The runs have stored their choice."""
    monkeypatch.chdir(tmp_path)
    for size, precision in ((32, "fp32"), (64, "bf16")):
        finish(tmp_path / f"s/batch_size={size}-seed0", f"learner.batch_size={size}", f"learner.precision={precision}")
    assert main([*COMMAND, "--set", "learner.precision=auto"]) == 0
    assert capsys.readouterr().out.startswith("2 of 2 runs are finished already\n")
    assert (tmp_path / "s" / "sweep.csv").exists()


@pytest.mark.parametrize("cluster", [[], ["--cluster", "auto"]])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--steps", "3000"], "total_steps is 2000 in the run, 3000 now"),
        (["--set", "learner.learning_rate=0.5"], "learner.learning_rate is 0.001 in the run, 0.5 now"),
        (
            [
                "--set",
                "robots=2",
                "--set",
                "simulators=2",
                "--set",
                "exploration.noise=0.5",
                "--set",
                "policy.frozen=true",
            ],
            "simulators is 1 in the run, 2 now; robots is 1 in the run, 2 now; exploration.noise is 0.1 in the run, "
            "0.5 now; other keys that differ: 1",
        ),
    ],
)
def test_a_sweep_refuses_runs_with_another_configuration_before_it_trains(
    changed: list[str],
    cluster: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second run is finished. The first run has no folder yet, and the sweep does not begin it."""
    monkeypatch.chdir(tmp_path)
    finish(tmp_path / "s/batch_size=64-seed0", "learner.batch_size=64")
    assert main([*COMMAND, *changed, *cluster]) == 2
    remedy = "set these keys as in the run, or name another --out"
    text = f"run folder 's/batch_size=64-seed0' has another configuration: {words}; {remedy}"
    assert capsys.readouterr().err == f"td3-robot sweep: {text}\n"
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["batch_size=64-seed0"]


def test_a_sweep_refuses_the_runs_of_another_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    finish(tmp_path / "s/batch_size=32-seed0", "learner.batch_size=32")
    assert main(["sweep", "walker2d", *COMMAND[2:], "--set", "learner.learning_starts=100"]) == 2
    error = capsys.readouterr().err
    assert 'task is "gymnasium:Pendulum-v1" in the run, "Walker2D" now; ' in error
    assert error.endswith("; set these keys as in the run, or name another --out\n")
    assert error.count("\n") == 1


def test_a_sweep_compares_with_the_newest_training_of_an_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration.load("pendulum", ["total_steps=2000", "learner.batch_size=32"])
    run = RunFolder.create(tmp_path / "s/batch_size=32-seed0", config)
    run.write_run(config=configuration.load("pendulum", ["total_steps=2000", "learner.batch_size=48"]).to_yaml())
    assert main(COMMAND) == 2
    assert "learner.batch_size is 48 in the run, 32 now" in capsys.readouterr().err


def test_the_file_of_a_shipped_policy_agrees_with_its_name(tmp_path: Path) -> None:
    overrides = ["task=Walker2D", "learner.start_from=walker2d", "learner.critics_first=9"]
    asked = configuration.load("pendulum", overrides)
    run = RunFolder.create(tmp_path / "run", with_policy_file(asked))
    assert run.config().learner.start_from != "walker2d"
    sweep._check_existing(run, asked)


@pytest.mark.parametrize(("folder", "why"), [("file", "File exists"), ("file/s", "Not a directory")])
def test_a_sweep_names_the_option_if_a_file_is_in_the_place_of_its_folder(
    folder: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["sweep", "pendulum", "--out", folder]) == 2
    error = f"td3-robot sweep: --out: folder '{folder}' cannot be made: {why}\n"
    assert capsys.readouterr().err == error


@pytest.mark.usefixtures("hangup")
def test_a_closed_terminal_stops_the_trainings_of_a_sweep(command: Callable[..., Command]) -> None:
    sweep = command("sweep", "pendulum", "--seeds", "0", "--steps", "1000000", "--out", "s")
    sweep.until("the training", lambda: psutil.Process(sweep.process.pid).children())
    [training] = psutil.Process(sweep.process.pid).children()
    sweep.process.send_signal(signal.SIGHUP)
    assert sweep.finish() == 128 + signal.SIGHUP, sweep.output()
    assert not training.is_running()


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
