"""Replay lock-step runs that returned to a checkpoint or resumed from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from td3_robot.messages import SimulatorState
from td3_robot.recording.reader import Session
from td3_robot.replay import check as replay

LOCKSTEP = (
    "record=true",
    "record.weights_every=1",
    "checkpoint.every=250",
    "learner.publish_every=100",
    "learner.replay_ratio=0.2",
    "learner.compile=true",
    "learner.threads=2",
)


def reports_of(*parts: Path) -> dict[str, replay.Outcome]:
    session = Session(parts)
    reports = replay.check(session)
    print(replay.text(session, reports))
    return {report.core: report for report in reports}


def recorded(path: Path, topic: str) -> int:
    return sum(count for (_, _, name), count in Session([path]).counts.items() if name == topic)


def compared(report: replay.Outcome) -> dict[str, int]:
    return {comparison.topic: comparison.compared for comparison, _ in report.comparisons}


@pytest.mark.slow
def test_replay_of_a_run_that_lost_a_simulator(train: Any, tmp_path: Path) -> None:
    """Replay compares the outputs of the policy server, the killed simulator and the new simulator with the recording.

    It compares the outputs of the learner up to the moment at which the learner returned to a checkpoint.
    """
    run = train(4000, *LOCKSTEP, options=("--lockstep",))
    made = run.wait_for_steps(600)
    run.children()["sim-0"].kill()
    run.wait_for("^sim-0 was killed by SIGKILL; starting it again$")
    assert run.finish() == 0, run.output()
    path = tmp_path / "run" / "session.mcap"
    states = [message for _, message in Session([path]).messages(("state",)) if isinstance(message, SimulatorState)]
    assert any(state.payload for state in states)
    reports = reports_of(path)
    for core in ("policy", "simulator", "learner"):
        assert reports[core].same
    assert compared(reports["policy"])["action"] >= 4000
    assert compared(reports["simulator"])["step"] >= 4000
    assert not reports["policy"].notes
    assert not reports["simulator"].notes
    assert any("does not contain the checkpoint to which the run returned" in note for note in reports["learner"].notes)
    assert compared(reports["learner"])["throttle"] >= made  # includes the Throttles sent before the kill


@pytest.mark.slow
def test_replay_of_a_resumed_run(train: Any, command: Any, tmp_path: Path) -> None:
    """Replay of the second part starts from the simulator state that the learner restored."""
    run = train(4000, *LOCKSTEP, options=("--lockstep",))
    run.wait_for_steps(600)
    run.interrupt()
    assert run.finish() == 130
    second = command("train", "--resume", "run", "--log-every", "0.2")
    assert second.finish() == 0, second.output()
    path = tmp_path / "run" / "session_1.mcap"
    reports = reports_of(path)
    for core in ("policy", "simulator"):
        assert not reports[core].notes
    for core in ("policy", "simulator", "learner"):
        assert reports[core].same
    assert compared(reports["simulator"])["step"] == recorded(path, "step") > 0
    assert compared(reports["policy"])["action"] == recorded(path, "action") > 0
    notes = [note.partition(": ") for note in reports["learner"].notes]
    continued = "the learner continued from a checkpoint or a replay file, which the recording does not contain"
    assert [what for what, _, why in notes if why == continued] == [
        "weights, Throttles and losses",
        "the learner's counters",
    ]
    assert not {"weights", "status"} & compared(reports["learner"]).keys()
    # For the learner, replay of both parts compares the same messages as replay of the first part alone, except the
    # loss statistics. Two learner processes made these statistics, so replay of both parts does not compare them.
    alone, whole = reports_of(path.with_name("session.mcap")), reports_of(path.with_name("session.mcap"), path)
    assert compared(alone["learner"])["weights"] >= 2
    expected = {topic: number for topic, number in compared(alone["learner"]).items() if topic != "loss statistics"}
    assert compared(whole["learner"]) == expected
    assert all(report.same for report in whole.values())
