"""Train with an algorithm from an installed package, and resume the run. All processes are real."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bundle import Bundle
from tests.conftest import install_metadata

SIGN_LEARNER = Path(__file__).parent.parent / "contract" / "sign_learner.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Install a package in the folder where the commands run. Python finds the package there."""
    shutil.copy(SIGN_LEARNER, tmp_path)
    install_metadata(tmp_path, "sign_learner", "td3_robot.algorithms", "sign = sign_learner:SignLearner")
    return tmp_path


@pytest.mark.slow
def test_own_algorithm_trains_resumes_and_exports_a_bundle(train: Any, command: Any, folder: Path) -> None:
    sets = ("learner.algorithm=sign", "learner.replay=uniform", "evaluation.every=600", "evaluation.episodes=1")
    run = train(1200, *sets)
    assert run.finish() == 0, run.output()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert losses
    assert Bundle.load(folder / "run" / "policy.safetensors").provenance["algorithm"] == "SIGN"
    resumed = command("train", "--resume", "run", "--steps", "1400")
    assert resumed.finish() == 0, resumed.output()
    last = sorted((folder / "run" / "checkpoint").glob("checkpoint-*.safetensors"))[-1]
    made = command("bundle", "create", str(last), "made.safetensors")
    assert made.finish() == 0, made.output()
    policy, bundle = (Bundle.load(folder / name) for name in ("run/policy.safetensors", "made.safetensors"))
    assert all((bundle.tensors[name] == tensor).all() for name, tensor in policy.tensors.items())


def test_unknown_algorithm_gives_one_line_of_error_before_the_run_starts(train: Any, folder: Path) -> None:
    run = train(600, "learner.algorithm=ppo")
    assert run.finish() == 2
    [line] = run.output().splitlines()
    assert "learner.algorithm is 'ppo'; allowed: td3, ddpg, a2c, sign" in line
    assert not (folder / "run").exists()


@pytest.mark.usefixtures("folder")
def test_prioritised_replay_needs_an_algorithm_with_td_errors(train: Any) -> None:
    run = train(1200, "learner.algorithm=sign", "learner.replay=lap")
    assert run.finish() == 2, run.output()
    wanted = "learner.replay is 'lap', but learner.algorithm gives no TD errors; learner.replay must be 'uniform'"
    assert wanted in run.output()
