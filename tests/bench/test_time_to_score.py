"""The comparison of the time to a score (benchmarks/time_to_score.py)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

time_to_score: Any = importlib.import_module("time_to_score")


def test_a_score_needs_two_successive_evaluations() -> None:
    """The means of two successive evaluations are 500, 1000 and 900."""
    points = [(10.0, 100, 0.0), (20.0, 200, 1000.0), (30.0, 300, 1000.0), (40.0, 400, 800.0)]
    assert time_to_score.times(points, (500, 950, 1001)) == [20.0, 30.0, None]
    assert time_to_score.times(points[:1], (0,)) == [None]


def test_unknown_contestant_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "sb4"])
    with pytest.raises(SystemExit):
        time_to_score.main()
    assert "the contestant is 'sb4'; allowed: td3-robot, sb3-td3, " in capsys.readouterr().err


@pytest.mark.slow
def test_short_trainings_are_kept_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No contestant learns in the first 10,000 of the 10,400 steps."""
    pytest.importorskip("stable_baselines3")
    sizes = ["--steps", "10400", "--every", "5200", "--episodes", "1", "--seeds", "3", "--robots", "Walker2D"]
    folders = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "td3-robot", "sb3-td3", *sizes, *folders, "--json"])
    for _ in range(2):
        assert time_to_score.main() == 0
    for name in ("td3-robot", "sb3-td3"):
        kept = json.loads((tmp_path / "out" / f"Walker2D-{name}-3.json").read_text())
        assert not kept["partial"]
        assert [steps // 100 for _, steps, _ in kept["evaluations"]] == [52, 104]
        seconds = [seconds for seconds, _, _ in kept["evaluations"]]
        assert 0 < seconds[0] < seconds[1]
    assert len(list((tmp_path / "runs").iterdir())) == 1  # the second call trained nothing
    assert '"1000.0": [\n' in capsys.readouterr().out
