"""The comparison of the times until a policy reaches a score (benchmarks/time_to_score.py)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from td3_robot import runs
from td3_robot.errors import UsageError

time_to_score: Any = importlib.import_module("time_to_score")
page: Any = importlib.import_module("time_to_score_page")
SCORES = {"Walker2D": (1000.0, 1500.0)}
LIMITS = time_to_score.Limits(300_000, 5_000, 10)
"""The default limits of the command line."""


def test_a_score_needs_two_successive_evaluations() -> None:
    """The means of each pair of successive evaluations are 500, 1000 and 900."""
    points = [(10.0, 100, 0.0), (20.0, 200, 1000.0), (30.0, 300, 1000.0), (40.0, 400, 800.0)]
    assert page.times(points, (500, 950, 1001)) == [20.0, 30.0, None]
    assert page.times(points[:1], (0,)) == [None]


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


def results(tmp_path: Path) -> list[dict[str, Any]]:
    """Write two seeds of td3-robot, three of a peer, and an unfinished training. Return the finished trainings.

    The evaluations are one minute apart. A return of 2000 after a return of 0 gives a mean of 1000.
    """
    returns = {
        ("sb3-td3", 2): [0, 0, 0, 2000],  # a mean of 1000 after 4 minutes, 1500 never
        ("sb3-td3", 0): [0, 2000, 2000],  # 1000 after 2 minutes, 2000 after 3
        ("sb3-td3", 1): [0, 0, 0, 0, 0],  # never, in 5 minutes
        ("td3-robot", 0): [0, 2000, 2000],
        ("td3-robot", 1): [0, 2000, 4000],
        ("sbx-td3", 0): [0, 0],
    }
    for (contestant, seed), made in returns.items():
        file = tmp_path / f"Walker2D-{contestant}-{seed}.json"
        points = [(60.0 * (place + 1), 5000 * (place + 1), float(value)) for place, value in enumerate(made)]
        training = time_to_score.Training(contestant, "Walker2D", seed, LIMITS, file, points)
        training.write(partial=contestant == "sbx-td3")
    finished: list[dict[str, Any]] = time_to_score.finished(tmp_path, LIMITS)
    return finished


def test_the_median_is_a_lower_bound_if_most_seeds_miss_the_score(tmp_path: Path) -> None:
    """For 1000, the peer needs 2 minutes, more than 5, and 4. For 1500, it needs 3, more than 5, and more than 4."""
    rows = {(row["score"], row["contestant"]): row for row in page.compare(results(tmp_path), SCORES)}
    assert list(rows) == [(score, name) for score in (1000, 1500) for name in ("td3-robot", "sb3-td3")]
    assert rows[1000, "td3-robot"]["seconds"] == [120.0, 120.0]
    theirs = rows[1000, "sb3-td3"]
    assert (theirs["seeds"], theirs["seconds"], theirs["ends"]) == ([0, 1, 2], [120.0, None, 240.0], [180, 300, 240])
    assert (theirs["median"], theirs["bound"]) == (240.0, False)
    assert (rows[1500, "sb3-td3"]["median"], rows[1500, "sb3-td3"]["bound"]) == (240.0, True)


def trainings(*returns: list[float], contestant: str = "sb3-td3") -> list[dict[str, Any]]:
    """Trainings with these returns, one for each seed. The first evaluation is at 0, the next after 61 s, and so on."""
    return [
        {
            "robot": "Walker2D",
            "contestant": contestant,
            "seed": seed,
            "evaluations": [(61.0 * place, place, value) for place, value in enumerate(made)],
        }
        for seed, made in enumerate(returns)
    ]


def test_a_seed_that_misses_the_score_counts_as_slower_than_the_others() -> None:
    """The missing seed ends after 61 s. The others need 122 s and 183 s, so the median is 183 s."""
    row = page.compare(trainings([0, 0], [0, 0, 2000], [0, 0, 0, 2000]), SCORES)[0]
    assert (row["seconds"], row["median"], row["bound"]) == ([None, 122.0, 183.0], 183.0, False)


def test_lower_bounds_are_rounded_down() -> None:
    """One of two seeds needs 122 s, the other more than 183 s. (122 + 183) / 2 = 152.5 s are 2.54 minutes.

    td3-robot needs 61 s, and 152.5 / 61 = 2.5. For 1500, it needs more than 61 s, so there is no ratio. For the peer,
    the bounds are (122 + 183) / 2 s, too. 183 s are 3.05 minutes.
    """
    made = [*trainings([0, 2000], contestant="td3-robot"), *trainings([0, 0, 2000], [0] * 4)]
    rows = page.compare(made, SCORES)
    assert list(page.table(rows))[2:] == [
        "| Walker2D | 1000 | td3-robot | 1.0, – | 1.0 | 1.0 |",
        "| Walker2D | 1000 | sb3-td3 | 2.0, not in 3.0 | > 2.5 | > 2.5 |",
        "| Walker2D | 1500 | td3-robot | not in 1.0, – | > 1.0 |  |",
        "| Walker2D | 1500 | sb3-td3 | not in 2.0, not in 3.0 | > 2.5 |  |",
    ]


def test_the_line_of_the_chart_is_the_median_of_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 122 s, the means of two evaluations are 0, 500 and 1000. After 183 s, they are 0, 1500 and 2000."""
    drawn: list[Any] = []
    monkeypatch.setattr(page.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes[0]))
    returns = ([0, 0, 0, 0], [0, 0, 1000, 2000], [0, 0, 2000, 2000])
    monkeypatch.setattr(page, "PAGE", tmp_path / "docs" / "explanation" / "results.md")
    page.draw("Walker2D", trainings(*returns), SCORES["Walker2D"])
    minutes, values = drawn[0].lines[0].get_data()
    assert np.interp([122 / 60, 183 / 60], minutes, values) == pytest.approx([500, 1500], abs=10)


def test_a_folder_without_finished_trainings_changes_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results(tmp_path)
    monkeypatch.setattr(time_to_score, "write", lambda *_: pytest.fail("the page was written"))
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "--report", "--out", str(tmp_path), "--episodes", "3"])
    with pytest.raises(UsageError, match=r"no finished training with the limits .*'episodes': 3"):
        time_to_score.main()


def test_a_training_with_one_evaluation_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "--steps", "8000", "--every", "4000"])
    with pytest.raises(SystemExit):
        time_to_score.main()
    assert "--steps is 8000; allowed: more than twice --every, which is 4000" in capsys.readouterr().err


def test_the_page_gets_a_table_and_a_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "docs" / "explanation" / "results.md"
    for folder in (file.parent, tmp_path / "docs" / "images", tmp_path / "data"):
        folder.mkdir(parents=True)
    results(tmp_path / "data")
    file.write_text("Text\n<!-- time to score: made by a command -->\n<!-- end of time to score -->\nMore text\n")
    monkeypatch.setattr(page, "PAGE", file)
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "--report", "--out", str(tmp_path / "data")])
    assert time_to_score.main() == 0
    assert file.read_text().splitlines()[4:-2] == [
        "| Walker2D | 1000 | td3-robot | 2.0, 2.0, – | 2.0 | 1.0 |",
        "| Walker2D | 1000 | sb3-td3 | 2.0, not in 5.0, 4.0 | 4.0 | 2.0 |",
        "| Walker2D | 1500 | td3-robot | 3.0, 3.0, – | 3.0 | 1.0 |",
        "| Walker2D | 1500 | sb3-td3 | 3.0, not in 5.0, not in 4.0 | > 4.0 | > 1.3 |",
    ]
    picture = tmp_path / "docs" / "images" / "time_to_score_walker2d.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"


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
    assert '"score": 1000.0' in capsys.readouterr().out
