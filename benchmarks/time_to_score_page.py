"""The table and the charts of benchmarks/time_to_score.py in docs/explanation/results.md.

A *training* is the content of a file in ``benchmarks/results/time_to_score``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from reliability import insert

from td3_robot.bench import harness

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "results.md"
OURS = "td3-robot"

Point = tuple[float, int, float]
"""An evaluation: seconds of training, environment steps, and mean return.

The seconds of a peer do not include the time of its evaluations.
"""
Scores = Mapping[str, Sequence[float]]
"""Maps a robot to the mean returns that its trainings must reach."""


def means(points: Sequence[Point]) -> list[tuple[float, float]]:
    """For each evaluation except the first, return its time and the mean return of this and the previous evaluation."""
    return [(now[0], (before[2] + now[2]) / 2) for before, now in pairwise(points)]


def times(points: Sequence[Point], scores: Sequence[float]) -> list[float | None]:
    """For each score, return the seconds until the mean of two successive evaluations reaches the score.

    The result is None for a score that is never reached.
    """
    reached = means(points)
    return [next((seconds for seconds, mean in reached if mean >= score), None) for score in scores]


def compare(trainings: Sequence[Mapping[str, Any]], scores: Scores) -> list[dict[str, Any]]:
    """Return a row for each robot, score and contestant, with times in seconds.

    ``seconds`` has the time of each seed, or None for a seed that misses the score. ``ends`` has the times of the last
    evaluations. ``median`` is the median of ``seconds``, where a seed that misses the score counts as the slowest. If
    too many seeds miss the score for this median, ``bound`` is true, and ``median`` is a lower bound from ``ends``.
    """
    groups: dict[tuple[str, float, str], list[Mapping[str, Any]]] = {}
    for training in trainings:
        for score in scores[training["robot"]]:
            groups.setdefault((training["robot"], score, training["contestant"]), []).append(training)
    rows = []
    for (robot, score, contestant), mine in sorted(groups.items(), key=lambda group: group[0][:2]):
        seconds = [times(it["evaluations"], [score])[0] for it in mine]
        ends = [it["evaluations"][-1][0] for it in mine]
        median = statistics.median([math.inf if made is None else made for made in seconds])
        at_least = statistics.median([end if made is None else made for made, end in zip(seconds, ends, strict=True)])
        rows.append(
            {
                "robot": robot,
                "score": score,
                "contestant": contestant,
                "seeds": [it["seed"] for it in mine],
                "seconds": seconds,
                "ends": ends,
                "median": at_least if median == math.inf else median,
                "bound": median == math.inf,
            }
        )
    return rows


def lines(report: harness.Report) -> Iterator[str]:
    for row in report["results"]:
        yield f"{row['robot']:9} {row['score']:5.0f} {row['contestant']:10} {_by_seed(row, report['results'])}"


def _by_seed(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The minutes of a row, for each seed that a row of the same robot has. A dash means: not trained."""
    cells = {
        seed: f"not in {_rounded_down(end / 60)}" if made is None else f"{made / 60:.1f}"
        for seed, made, end in zip(row["seeds"], row["seconds"], row["ends"], strict=True)
    }
    seeds = sorted({seed for other in rows if other["robot"] == row["robot"] for seed in other["seeds"]})
    return ", ".join(cells.get(seed, "–") for seed in seeds)


def _figure(value: float, *, bound: bool) -> str:
    """A value, or a lower bound such as ``> 2.5``."""
    return f"> {_rounded_down(value)}" if bound else f"{value:.1f}"


def _rounded_down(value: float) -> str:
    return f"{math.floor(10 * value) / 10:.1f}"


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown. There is no ratio if the median of td3-robot is missing or a bound."""
    known = [row for row in rows if row["contestant"] == OURS and not row["bound"]]
    ours = {(row["robot"], row["score"]): row["median"] for row in known}
    yield "| robot | return | package | minutes, by seed | median | ratio to td3-robot |"
    yield "|---|--:|---|--:|--:|--:|"
    for row in rows:
        mine = ours.get((row["robot"], row["score"]))
        name = f"{row['robot']} | {row['score']:.0f} | {row['contestant']}"
        median = _figure(row["median"] / 60, bound=row["bound"])
        ratio = _figure(row["median"] / mine, bound=row["bound"]) if mine else ""
        yield f"| {name} | {_by_seed(row, rows)} | {median} | {ratio} |"


def write(trainings: Sequence[Mapping[str, Any]], scores: Scores) -> None:
    """Write the table into the page of results, and draw a chart for each robot."""
    rows = compare(trainings, scores)
    insert("time to score", list(table(rows)), PAGE)
    for robot in dict.fromkeys(row["robot"] for row in rows):
        draw(robot, [it for it in trainings if it["robot"] == robot], scores[robot])


def draw(robot: str, trainings: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> None:
    """Draw the mean of two successive evaluations over the minutes of training.

    For each contestant, a line shows the median of the seeds, and a band shows the lowest and the highest seed. A
    training that has ended keeps its last value.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, contestant in enumerate(dict.fromkeys(it["contestant"] for it in trainings)):
        curves = [np.transpose(means(it["evaluations"])) for it in trainings if it["contestant"] == contestant]
        seconds = np.linspace(max(curve[0][0] for curve in curves), max(curve[0][-1] for curve in curves), 200)
        values = np.array([np.interp(seconds, *curve) for curve in curves])
        label = f"{contestant} ({len(curves)} seed{'s' if len(curves) > 1 else ''})"
        axes.plot(seconds / 60, np.median(values, 0), color=f"C{colour}", label=label)
        axes.fill_between(seconds / 60, values.min(0), values.max(0), color=f"C{colour}", alpha=0.2, linewidth=0)
    for score in scores:
        axes.axhline(score, color="0.4", linestyle="--", linewidth=1)
    axes.set(title=robot, xlabel="minutes", ylabel="mean return of two successive evaluations", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(PAGE.parents[1] / "images" / f"time_to_score_{robot.lower()}.png", dpi=100)
