"""Replay a learner with a configuration that is not in the stored sessions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as with_fields

from td3_robot.config import loading as configuration
from td3_robot.learner.scheduling.lockstep import LockStep
from td3_robot.messages import Start
from td3_robot.recording.entries import CONFIG, Entry, Facts
from td3_robot.recording.reader import Session
from td3_robot.recording.writer import write
from td3_robot.replay.check import check
from td3_robot.transport import codec
from tests.replay.make_sessions import PENDULUM
from tests.replay.stages import Stage


def test_replay_succeeds_for_a_lock_step_session_with_a_replay_buffer_in_a_file_and_n_step_3(tmp_path: Path) -> None:
    """Replay also makes a second learner, which only stores transitions. This learner is always free-running.

    A free-running configuration must not combine ``replay_storage: file`` with ``n_step`` 3. So replay must change the
    configuration of the second learner.
    """
    overrides = ("learner.replay_storage=file", "learner.n_step=3", "learner.learning_starts=20", "timing=lockstep")
    target = tmp_path / "session.mcap"
    stage = Stage(target, configuration.load("walker2d", [*PENDULUM, *overrides, "total_steps=60"]))
    scheduler = stage.learner.scheduler
    assert isinstance(scheduler, LockStep)
    for _ in stage.turns():
        stage.play([])
        if scheduler.snapshot_ready:
            scheduler.snapshot_saved()
    stage.close()
    [report] = check(Session([target]), ["learner"])
    assert report.same, report
    assert {comparison.topic for comparison, _ in report.comparisons} >= {"weights", "throttle"}


def test_the_recording_of_a_learner_on_a_gpu_can_be_replayed_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay does not repeat the updates, but compares counters and transitions."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    session = Session([Path(__file__).parent / "sessions" / "pendulum.mcap"])

    def on_gpu(config: str) -> str:
        assert "device: cpu" in config
        return config.replace("device: cpu", "device: cuda").replace("precision: fp32", "precision: bf16")

    def entries() -> Iterator[Entry]:
        for entry in session.entries():
            message = session.decode(entry)
            if isinstance(message, Start) and message.role == "learner":
                entry = replace(entry, payload=codec.encode(with_fields(message, config=on_gpu(message.config))))
            yield entry

    attachments = [
        replace(item, data=on_gpu(item.data.decode()).encode()) if item.name == CONFIG else item
        for item in session.attachments.values()
    ]
    write(tmp_path / "a.mcap", Facts(session.metadata, attachments), entries())
    [report] = check(Session([tmp_path / "a.mcap"]), ["learner"])
    assert report.same
    assert any("computed on a GPU" in note for note in report.notes)
    assert {comparison.topic for comparison, _ in report.comparisons} == {"status", "transition"}
