"""The built wheel works outside the checkout. It contains the simulators and all shipped data files."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.process.conftest import ROOT


def test_wheel_contains_packages_and_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"td3_robot", "td3_robot_sims"}
    for folder in ("configs", "launch", "policies", "templates", "docs/systemd"):
        source = ROOT / folder
        shipped = {name for name in names if name.startswith(f"td3_robot/data/{source.name}/")}
        files = [
            path.relative_to(source.parent) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"
        ]
        assert shipped == {f"td3_robot/data/{file}" for file in files}
    assert {"td3_robot/py.typed", "td3_robot/learner/engine/update.cpp"} <= set(names)


@pytest.mark.slow
def test_a_training_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel comes first on the import path, so Python does not use the checkout."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    small = ("learning_starts=100", "batch_size=16", "precision=fp32", "threads=1", "compile=false")
    sets = ["network.hidden=[16]", "evaluation.every=0", *(f"learner.{item}" for item in small)]
    command = [sys.executable, "-P", "-m", "td3_robot.cli.main", "train", "walker2d", "--steps", "200", "--out", "run"]
    done = subprocess.run(
        [*command, *(word for item in sets for word in ("--set", item))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "final policy: mean return" in done.stdout
    where = [sys.executable, "-P", "-c", "import td3_robot.util.resources as r; print(r.folder('configs'))"]
    found = subprocess.run(
        where, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(site / "td3_robot" / "data" / "configs")


def test_the_python_api_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    overrides = {"network.hidden": [16], "learner.learning_starts": 50, "learner.batch_size": 16, "evaluation.every": 0}
    overrides |= {"learner.precision": "fp32", "learner.threads": 1, "learner.compile": False}
    code = (
        "import td3_robot as tr\n"
        "assert tr.__file__.startswith(SITE), tr.__file__\n"
        "print(*tr.shipped_policies(), tr.__version__)\n"
        "print(tr.evaluate('walker2d', episodes=1, max_steps=20).task)\n"
        f"run = tr.train('pendulum', total_steps=100, out='run', overrides={overrides!r}, progress=False)\n"
        "print(run.env_steps, run.best_policy)\n"
    ).replace("SITE", repr(str(site)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    policies, task, trained = done.stdout.splitlines()
    assert policies.split()[:2] == ["ant", "walker2d"]
    assert task == "Walker2D"
    assert trained == "100 <Policy for gymnasium:Pendulum-v1: 3 observations, 1 actions>"
