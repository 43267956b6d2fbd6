"""Training with A2C, the on-policy algorithm: the learner, policy server and simulators run as separate processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bundle import Bundle
from td3_robot.config import loading as configuration
from td3_robot.messages import Step
from td3_robot.recording.reader import Session
from td3_robot.replay import check as replay
from tests.in_process import InProcess
from tests.process.test_resume import differences
from tests.process.test_training import in_process_differences

SETS = (
    "a2c.episodes=60",
    "learner.learning_rate_end=1",
    "network.hidden=[64, 64]",
    "evaluation.every=1000",
    "record=true",
)
OPTIONS = [word for item in SETS for word in ("--set", item)]


@pytest.mark.slow
def test_a2c_learns_resumes_and_replays_bit_for_bit(command: Any, tmp_path: Path) -> None:
    """Untrained policies get a return of about 20. With this seed, training gives over 200; the test demands 100."""
    run = command("train", "cartpole_a2c", "--out", "run", "--seed", "7", *OPTIONS)
    assert run.finish() == 0, run.output()
    folder = tmp_path / "run"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert all(record["entropy"] > 0 and record["critic_loss"] > 0 for record in train)
    assert records[-1]["final"]
    assert records[-1]["eval_return_mean"] > 100
    best = Bundle.load(folder / "best.safetensors")
    assert (best.provenance["algorithm"], best.exploration.kind) == ("A2C", "categorical_v2")
    assert json.loads((folder / "final.json").read_text())["learner"]["figures"]["updates"] == 60

    alone = InProcess(configuration.load(folder / "config.yaml"))
    alone.run()
    alone.close()
    alone.learner.publisher.evaluations.pending.clear()  # these policies wait for an evaluator, but ``alone`` has none
    assert in_process_differences(folder, alone) == []

    reports = {report.core: report for report in replay.check(Session([folder / "session.mcap"]))}
    for core in ("policy", "simulator", "learner"):
        assert reports[core].same
    applied = [message for _, message in Session([folder / "session.mcap"]).messages(("step",))]
    assert {step.noise_kind for step in applied if isinstance(step, Step)} == {0, 8}  # none, categorical

    other = command("train", "cartpole_a2c", "--out", "other", "--seed", "7", "--log-every", "0.2", *OPTIONS)
    other.wait_for_steps(300)
    other.interrupt()
    assert other.finish() == 130, other.output()
    resumed = command("train", "--resume", "other")
    assert resumed.finish() == 0, resumed.output()
    assert differences(folder, tmp_path / "other") == []


@pytest.mark.slow
def test_a2c_trains_with_two_free_running_simulators(command: Any, tmp_path: Path) -> None:
    sets = ("timing=free", "simulators=2", "robots=3", "evaluation.every=0")
    run = command(
        "train", "cartpole_a2c", "--out", "run", "--set", "a2c.episodes=30", *[w for s in sets for w in ("--set", s)]
    )
    assert run.finish() == 0, run.output()
    assert json.loads((tmp_path / "run" / "final.json").read_text())["learner"]["figures"]["updates"] == 30
    checkpoint = next((tmp_path / "run" / "checkpoint").iterdir())
    made = command("bundle", "create", str(checkpoint), "policy.safetensors")
    assert made.finish() == 0, made.output()
