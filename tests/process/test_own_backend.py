"""Train, evaluate and replay with a simulator backend from an installed package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import install_metadata

POINT_MASS = Path(__file__).parent.parent / "contract" / "point_mass.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Install a package in the folder where the commands run. Python finds the package there."""
    shutil.copy(POINT_MASS, tmp_path)
    install_metadata(tmp_path, "point_mass", "td3_robot.backends", "toy = point_mass:PointMassBackend")
    return tmp_path


@pytest.mark.slow
def test_own_backend_trains_evaluates_and_replays(train: Any, command: Any, folder: Path) -> None:
    run = train(600, "task=toy:Point", "evaluation.every=300", "evaluation.episodes=2", "record=true")
    assert run.finish() == 0, run.output()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "evaluation"]
    assert evaluations
    replayed = command("replay", str(Path("run", "session.mcap")), "--core", "simulator")
    assert replayed.finish() == 0, replayed.output()
    assert "DIFFERS" not in replayed.output()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("task=toy:Pint",), "task toy:Pint does not exist; allowed: Point"),
        (("task=toys:Point",), "the simulator backend of task 'toys:Point' is 'toys'; did you mean 'toy'?"),
        (
            ("task=toy:Point", "randomization.tilt=[0, 0.1]"),
            "the backend 'toy' of the task supports only the keys: action_latency",
        ),
    ],
)
def test_wrong_settings_give_one_line_of_error_before_the_run_starts(
    settings: tuple[str, ...], words: str, train: Any, folder: Path
) -> None:
    run = train(600, *settings)
    assert run.finish() == 2
    [line] = run.output().splitlines()
    assert words in line
    assert not (folder / "run").exists()
