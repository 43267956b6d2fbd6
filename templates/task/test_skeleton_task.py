"""Tests of the task "skeleton".

python -m pytest test_skeleton_task.py
"""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import td3_robot as tr

FOLDER = Path(__file__).parent


def test_environment_follows_the_rules_of_gymnasium() -> None:
    check_env(gymnasium.make("skeleton_task:Skeleton-v0").unwrapped)


def test_short_training_makes_a_policy_for_the_robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training starts a simulator process, which imports the task from this folder."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    few = {"learner.learning_starts": 100, "evaluation.every": 0}
    run = tr.train(FOLDER / "skeleton.yaml", total_steps=300, out=tmp_path / "run", overrides=few, progress=False)
    assert run.env_steps == 300
    assert run.final_policy.spec.name == "Skeleton"
