"""The comparison of the times until a policy reaches a score (benchmarks/time_to_score.py)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from td3_robot import runs
from td3_robot.errors import UsageError

time_to_score: Any = importlib.import_module("time_to_score")


def test_a_score_needs_two_successive_evaluations() -> None:
    """The means of each pair of successive evaluations are 500, 1000 and 900."""
    points = [(10.0, 100, 0.0), (20.0, 200, 1000.0), (30.0, 300, 1000.0), (40.0, 400, 800.0)]
    assert time_to_score.times(points, (500, 950, 1001)) == [20.0, 30.0, None]
    assert time_to_score.times(points[:1], (0,)) == [None]


def test_unknown_contestant_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "sb4"])
    with pytest.raises(SystemExit):
        time_to_score.main()
    assert "the contestant is 'sb4'; allowed: td3-robot, sb3-td3, " in capsys.readouterr().err


def test_an_evaluation_that_is_read_late_keeps_the_time_when_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the learner starts 5 s after the training begins. So 19 s on this clock are 24 s of training.

    The evaluation is made at 24 s. The script reads it only after 125 s, because the final evaluation takes 100 s. The
    final evaluation is not one of the points.
    """
    clock, made = SimpleNamespace(now=1000.0), []

    def evaluate(wall_s: float, final: bool = False) -> None:
        made.append({"final": final, "env_steps": int(wall_s), "eval_return_mean": 0.0, "wall_s": wall_s})

    def train(*_: Any, callback: Any, **__: Any) -> None:
        evaluate(9.0)
        clock.now += 15
        assert callback(runs.TrainingProgress(10, 20, 10, None, {"wall_s": 10.0}))
        evaluate(19.0)
        evaluate(20.0, final=True)
        clock.now += 110

    monkeypatch.setattr(time_to_score, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs, "open_run", lambda _: SimpleNamespace(metrics=lambda: made))
    training = time_to_score.Training("td3-robot", "Ant", 0, time_to_score.Limits(20, 5, 1), tmp_path / "Ant.json")
    time_to_score.train_ours(training, tmp_path)
    assert training.points == [(14.0, 9, 0.0), (24.0, 19, 0.0)]


def test_a_falling_learning_rate_stays_0_after_a_million_steps() -> None:
    """The training has two million steps, so one million are made when the remaining share is 0.5."""
    rate = time_to_score.falling(8.0, 2_000_000)
    assert [rate(remaining) for remaining in (1.0, 0.75, 0.5, 0.25)] == [8.0, 4.0, 0.0, 0.0]


@pytest.mark.parametrize("other", [{"steps": 30}, {"every": 2}, {"episodes": 2}])
def test_a_finished_training_with_other_limits_is_refused(tmp_path: Path, other: dict[str, int]) -> None:
    limits = time_to_score.Limits(20, 5, 1)
    training = time_to_score.Training("sb3-td3", "Ant", 0, limits, tmp_path / "Ant.json")
    again = time_to_score.Training("sb3-td3", "Ant", 0, limits._replace(**other), training.file)
    training.write()
    assert not again.done
    training.write(partial=False)
    assert training.done
    with pytest.raises(UsageError, match=r"Ant\.json has the limits .*'steps': 20.* name another --out"):
        _ = again.done


@pytest.mark.slow
def test_short_trainings_are_kept_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both contestants learn only in the last 100 of the 10,100 steps. The last evaluation is after step 8,000."""
    pytest.importorskip("stable_baselines3")
    sizes = ["--steps", "10100", "--every", "4000", "--episodes", "1", "--seeds", "3", "--robots", "Walker2D"]
    folders = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "td3-robot", "sb3-td3", *sizes, *folders, "--json"])
    for _ in range(2):
        assert time_to_score.main() == 0
    for name in ("td3-robot", "sb3-td3"):
        kept = json.loads((tmp_path / "out" / f"Walker2D-{name}-3.json").read_text())
        assert not kept["partial"]
        assert [steps // 100 for _, steps, _ in kept["evaluations"]] == [40, 80]
        seconds = [seconds for seconds, _, _ in kept["evaluations"]]
        assert 0 < seconds[0] < seconds[1]
    assert len(list((tmp_path / "runs").iterdir())) == 1  # the second call trained nothing
    assert '"1000.0": [\n' in capsys.readouterr().out
