"""Errors and notices of ``td3-robot train`` before it starts processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from td3_robot_sims import tasks

from td3_robot.bundle import Bundle
from td3_robot.cli import train
from td3_robot.cli.main import main
from td3_robot.config import loading as configuration
from td3_robot.config.learner import LearnerConfig
from td3_robot.runtime import prepare
from td3_robot.runtime.prepare import Prepared, compile_notices, thread_notices
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.training import Trained
from tests.contract.point_mass import PointMassBackend


@pytest.mark.parametrize(
    ("task", "option"),
    [("gymnasium:pendulum_task:SwingUp-v0", " --task gymnasium:pendulum_task:SwingUp-v0"), ("Walker2D", "")],
)
def test_ctrl_c_during_the_final_evaluation_names_the_command_that_evaluates_the_policy(
    task: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """eval imports the module of a task only if ``--task`` names it."""
    config = configuration.parse({"task": task})
    run = RunFolder.create(tmp_path / "run", config)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_new", lambda _: Prepared(run, config, []))
    monkeypatch.setattr(train, "train", lambda *_, **__: Trained(0, 1.0, 0))
    monkeypatch.setattr(train, "evaluate_final", interrupt)
    assert main(["train", "--task", task]) == 130
    command = f"td3-robot eval {run.policy_file}{option}"
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"stopped; the trained policy is saved: {command}")


@pytest.mark.parametrize(
    ("critics", "text"), [("10", "for another robot"), ("0", "learner.critics_first is 0: untrained critics")]
)
def test_a_training_with_start_from_needs_critics_first_above_0_and_a_policy_for_this_robot(
    critics: str, text: str, make_bundle: Callable[..., Bundle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bundle().save(tmp_path / "toy.safetensors")
    sets = ["--set", f"learner.start_from={tmp_path / 'toy.safetensors'}", "--set", f"learner.critics_first={critics}"]
    assert main(["train", "walker2d", "--out", str(tmp_path / "run"), *sets]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_an_error_before_there_is_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """walker2d has ``precision: auto``. The choice of a precision needs torch, so the check for torch comes first."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else found(name, *more)
    )
    assert main(["train", "walker2d", "--out", str(tmp_path / "run")]) == 2
    assert "td3-robot train: needs torch, which is not installed; pip install" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_algorithm_is_an_error_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "walker2d", "--out", str(tmp_path / "run"), "--set", "learner.algorithm=ddgp"]
    assert main(words) == 2
    assert "td3-robot train: learner.algorithm is 'ddgp'; did you mean 'ddpg'?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("toy:Point", "task 'toy:Point' needs the package no-such-engine, which is not installed"),
        ("Walker2D", "needs pybullet, which"),
    ],
)
def test_train_needs_only_the_packages_of_the_tasks_backend(
    task: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, gymnasium, pybullet and no-such-engine count as not installed.

    Of these three packages, the toy backend needs only no-such-engine.
    """
    found = prepare.version
    monkeypatch.setattr(
        prepare, "version", lambda name: "" if name in ("gymnasium", "pybullet", "no-such-engine") else found(name)
    )
    monkeypatch.setattr(PointMassBackend, "packages", ("numpy", "no-such-engine"))
    monkeypatch.setitem(tasks.BACKENDS.rows, "toy", "tests.contract.point_mass:PointMassBackend")
    assert main(["train", "walker2d", "--out", str(tmp_path / "run"), "--set", f"task={task}"]) == 2
    assert f"td3-robot train: {text}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seconds", ["nan", "0", "-3", "inf"])
def test_the_value_of_log_every_must_be_a_finite_time_above_0(
    seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "walker2d", "--out", str(tmp_path / "run"), f"--log-every={seconds}"]) == 2
    assert f"--log-every is {seconds}; allowed: above 0 s" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("threads", "where", "device", "beginnings"),
    [
        (2, "critics", "cpu", []),
        (
            3,
            "critics",
            "cpu",
            ["learner.threads is 3 and this machine has 2 cores for all processes: the threads will"],
        ),
        (2, "operators", "cpu", ["learner.threads is 2, threads_in is operators, and this machine has 2 cores"]),
        (1, "operators", "cpu", []),
        (9, "operators", "cuda", []),
    ],
)
def test_a_notice_warns_about_threads_that_will_wait_for_each_other(
    threads: int, where: Any, device: Any, beginnings: list[str]
) -> None:
    found = thread_notices(LearnerConfig(threads=threads, threads_in=where, device=device), 2)
    assert len(found) == len(beginnings)
    assert all(line.startswith(begin) for line, begin in zip(found, beginnings, strict=True))


def test_notices_tell_of_the_first_compilation_and_of_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_notices(LearnerConfig()) == []
    assert compile_notices(LearnerConfig(compile=True, device="cuda")) == []
    monkeypatch.setenv("CXX", sys.executable)  # any existing program counts as a compiler
    (line,) = compile_notices(LearnerConfig(compile=True))
    assert line == "learner.compile: the first run on this machine compiles the update, which takes about 10 s"
    monkeypatch.setenv("CXX", "/nowhere/g++")
    (line,) = compile_notices(LearnerConfig(compile=True))
    assert line.startswith(
        "learner.compile is true and there is no C++ compiler '/nowhere/g++' (to use another one, set CX"
    )
    assert line.endswith("updates run uncompiled, which is slower")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no C++ compiler 'clang++'" in compile_notices(LearnerConfig(compile=True))[0]
