"""The scripts of ``benchmarks/`` run and report consistent results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def report(script: str, *arguments: str) -> Any:
    """Run a script in a child process and return its JSON output."""
    command = [sys.executable, str(SCRIPTS / script), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def module(script: str) -> Any:
    """Import a script without running it."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, SCRIPTS / script)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_learner_peers() -> None:
    sizes = ("--seconds", "0.01", "--repetitions", "1", "--networks", "256-256", "--threads", "1", "--no-compile")
    rows = {row["kind"]: row for row in report("learner_peers.py", *sizes)["results"]}
    assert rows.keys() >= {"sb3", "fp32", "products fp32"}
    ours, theirs, limit = (rows[kind]["updates_per_s"] for kind in ("fp32", "sb3", "products fp32"))
    assert rows["fp32"]["over_sb3"] == pytest.approx(ours / theirs)
    assert rows["fp32"]["share_of_peak"] == pytest.approx(ours / limit)
    assert rows["sb3"]["share_of_peak"] is None


def test_products_of_an_update() -> None:
    """Networks 22-4-3-6 and 28-4-3-1, whose layers all differ in size.

    Multiplications for one sample: actor 22·4 + 4·3 + 3·6 = 118, critic 28·4 + 4·3 + 3·1 = 127.

    Critic update: target actor 118; two targets, two critics and their weight gradients 3 · 2 · 127 = 762; input
    gradients of both critics without the first layer 2 · (3·1 + 4·3) = 30; sum 910.

    Actor update: actor 118; critic 127; gradient of the critic's action input 3·1 + 4·3 + 4·6 = 39; weight gradients
    of the actor 118; its input gradients 4·3 + 3·6 = 30; sum 432.
    """
    critic, actor = module("learner_peers.py").products((4, 3))
    assert sum(m * k * n for m, k, n in critic) == 256 * 910
    assert sum(m * k * n for m, k, n in actor) == 256 * 432


def test_train_peers() -> None:
    """With networks that cost nothing."""
    tiny = ("--threads", "1", "--hidden", "8", "--batch", "4", "--no-compile", "--steps", "1000", "--rounds", "1")
    rows = {row["kind"]: row for row in report("train_peers.py", *tiny)["results"]}
    ours, theirs = rows["fp32"], rows["sb3"]
    assert theirs["over_faster_sb3"] == 1
    assert ours["over_faster_sb3"] == pytest.approx(ours["steps_per_s"] / theirs["steps_per_s"])


def test_trainings_compare_with_the_faster_peer_of_each_round() -> None:
    """Theirs 10 and 20 on one thread, 30 and 5 on two: the faster is 30, then 20. So 60/30 and 60/20 give 2.5."""
    speeds = {("sb3", 1): [10, 20], ("sb3", 2): [30, 5], ("fp32", 1): [60, 60]}
    assert module("train_peers.py").compare(speeds, [60, 60]) == {"over_faster_sb3": 2.5}
