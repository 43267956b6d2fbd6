"""Replay a learner with a configuration that is not in the stored sessions."""

from __future__ import annotations

from pathlib import Path

from td3_robot.config import loading as configuration
from td3_robot.learner.scheduling.lockstep import LockStep
from td3_robot.recording.reader import Session
from td3_robot.replay.check import check
from tests.replay.make_sessions import PENDULUM
from tests.replay.stages import Stage


def test_a_lock_step_session_with_a_replay_file_and_n_step_returns_replays(tmp_path: Path) -> None:
    """This configuration is valid only in lock-step, but replay also makes a free-running learner from it.

    That learner only stores transitions. In free-running, ``replay_storage: file`` and ``n_step`` 3 conflict.
    """
    overrides = ("learner.replay_storage=file", "learner.n_step=3", "learner.learning_starts=20", "timing=lockstep")
    target = tmp_path / "session.mcap"
    stage = Stage(target, configuration.load("walker2d", [*PENDULUM, *overrides, "total_steps=60"]))
    scheduler = stage.learner.scheduler
    assert isinstance(scheduler, LockStep)
    scheduler.keep_snapshots()
    for _ in stage.turns():
        stage.play([])
        if scheduler.snapshot_ready:
            scheduler.snapshot_saved()
    stage.close()
    [report] = check(Session([target]), ["learner"])
    assert report.same, report
    assert {comparison.topic for comparison, _ in report.comparisons} >= {"weights", "throttle"}
