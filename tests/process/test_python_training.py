"""Trainings from Python: with a callback, from a thread, stopped by Ctrl-C, and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import td3_robot as tr
from td3_robot.runtime import best_policy

OVERRIDES = {
    "network.hidden": [16],
    "learner.batch_size": 16,
    "learner.learning_starts": 100,
    "learner.precision": "fp32",
    "learner.threads": 2,
    "learner.compile": False,
    "evaluation.every": 0,
}


@pytest.mark.slow
def test_a_training_runs_to_its_end_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tr.TrainingProgress] = []
    run = tr.train("pendulum", total_steps=600, seed=3, out=tmp_path / "run", overrides=OVERRIDES, callback=seen.append)
    assert (run.path, run.env_steps) == (tmp_path / "run", 600)
    assert (seen[-1].env_steps, seen[-1].total_steps) == (600, 600)
    assert seen[-1].updates > 0
    assert [state.env_steps for state in seen] == sorted(state.env_steps for state in seen)
    (final,) = run.metrics()
    assert (final["final"], final["env_steps"]) == (True, 600)
    provenance = run.best_policy.provenance
    assert (provenance["seed"], provenance["eval_return_mean"]) == (3, final["eval_return_mean"])
    assert run.final_policy.predict(np.zeros(3)).shape == (1,)
    assert run.metrics("train") == []  # the learner makes one such record every 1,000 steps, and this run has 600
    with pytest.raises(ValueError, match="kind is 'training'; allowed: evaluation, train, offline"):
        run.metrics("training")
    out, err = capsys.readouterr()
    assert out == ""
    assert "training gymnasium:Pendulum-v1 for 600 steps" in err
    assert "\r" not in err

    best = run.path / "best.safetensors"
    best_policy.keep(best, best.read_bytes(), 0.0)  # 0.0 is the highest possible return, so this policy stays the best
    kept = best.read_bytes()
    resumed = tr.open_run(run.path).resume(total_steps=800, progress=False)
    assert best.read_bytes() == kept
    assert (resumed.env_steps, [record["env_steps"] for record in resumed.metrics()]) == (800, [600, 800])
    assert resumed.resume().metrics() == resumed.metrics()  # resume() does not continue a finished run
    assert capsys.readouterr() == ("", "")


def test_a_callback_stops_a_training_in_a_thread_and_the_policy_is_kept(tmp_path: Path) -> None:
    """A notebook may train in a thread. ``train`` must work there, although only the main thread can handle signals."""
    runs: list[tr.Run] = []

    def work() -> None:
        runs.append(
            tr.train(
                "pendulum",
                total_steps=1_000_000,
                out=tmp_path / "run",
                overrides=OVERRIDES,
                callback=lambda state: state.updates < 50,
                progress=False,
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (run,) = runs
    assert 0 < run.env_steps < 1_000_000
    assert run.final_policy.provenance["updates"] >= 50
    assert run.best_policy.predict(np.zeros((4, 3))).shape == (4, 1)


def test_an_error_in_the_callback_stops_the_processes_and_is_raised(tmp_path: Path) -> None:
    def fail(state: tr.TrainingProgress) -> None:
        raise ZeroDivisionError(state.env_steps)

    with pytest.raises(ZeroDivisionError):
        tr.train("pendulum", out=tmp_path / "run", overrides=OVERRIDES, callback=fail, progress=False)
    assert tr.open_run(tmp_path / "run").path == tmp_path / "run"


SCRIPT = """
import td3_robot as tr
try:
    show = lambda state: print(state.env_steps, flush=True)
    tr.train("walker2d_fast", total_steps=10**6, out="run", overrides=OVERRIDES, callback=show)
except KeyboardInterrupt:
    print("interrupted at", tr.open_run("run").env_steps, "with", tr.load_policy("run"))
"""


def test_ctrl_c_stops_the_processes_and_raises_keyboard_interrupt(tmp_path: Path) -> None:
    code = f"OVERRIDES = {OVERRIDES!r}\n{SCRIPT}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    while int(process.stdout.readline()) < 500:
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "interrupted at" in out
    assert "with <Policy for Walker2D" in out
    assert "stopped; everything learned is saved; continue: td3_robot.open_run(" in err


def test_wrong_arguments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(tr.Td3RobotError, match=r"no file 'walker3d'"):
        tr.train("walker3d")
    with pytest.raises(tr.Td3RobotError, match=r"^overrides: unknown key 'learner.batchsize'; did you mean"):
        tr.train("walker2d", overrides={"learner.batchsize": 3}, out=tmp_path / "run")
    with pytest.raises(ValueError, match="total_steps is given twice"):
        tr.train("walker2d", total_steps=3, overrides={"total_steps": 4}, out=tmp_path / "run")
    with pytest.raises(tr.Td3RobotError, match=r"^total_steps is 0; it must be a whole number"):
        tr.train("walker2d", total_steps=0, out=tmp_path / "run")
    with pytest.raises(ValueError, match="train needs a configuration or a task"):
        tr.train(total_steps=100)
    with pytest.raises(tr.Td3RobotError, match=r"Walker3D"):
        tr.train(task="Walker3D", out=tmp_path / "run")
    with pytest.raises(tr.Td3RobotError, match="holds no run"):
        tr.open_run(tmp_path)
    assert not (tmp_path / "run").exists()
