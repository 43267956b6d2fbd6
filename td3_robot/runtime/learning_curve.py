"""Draws learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from td3_robot.runtime.metrics import read


def draw(metrics: Path, target: Path, title: str) -> None:
    """Draw training returns and evaluation returns (mean ± standard deviation) of ``metrics.jsonl``."""
    train = [record for record in read(metrics, "train") if "return_mean" in record]
    evaluations = read(metrics, "evaluation")
    steps = [record["env_steps"] for record in evaluations]
    means = [record["eval_return_mean"] for record in evaluations]
    stds = [record["eval_return_std"] for record in evaluations]
    low = [mean - std for mean, std in zip(means, stds, strict=True)]
    high = [mean + std for mean, std in zip(means, stds, strict=True)]
    with _axes(target, title, "upper left") as axes:
        axes.plot(
            [record["env_steps"] for record in train],
            [record["return_mean"] for record in train],
            color="0.7",
            label="training episodes, with noise (mean of 20)",
        )
        axes.plot(steps, means, "o-", markersize=3, color="C0", label="evaluation, no noise (mean ± std)")
        axes.fill_between(steps, low, high, color="C0", alpha=0.2, linewidth=0)


def draw_bands(bands: Mapping[str, Mapping[str, Sequence[float]]], target: Path, title: str) -> None:
    """Draw the curve and the band of each group of runs into an image file.

    ``bands`` maps the label of a group to ``env_steps``, ``mean``, ``low`` and ``high``.
    """
    with _axes(target, title, "lower right") as axes:
        for number, (label, band) in enumerate(bands.items()):
            color = f"C{number}"
            axes.plot(band["env_steps"], band["mean"], "o-", markersize=3, color=color, label=label)
            axes.fill_between(band["env_steps"], band["low"], band["high"], color=color, alpha=0.2, linewidth=0)


@contextmanager
def _axes(target: Path, title: str, legend: str) -> Iterator[Any]:
    """Yield axes to draw on. At the end, write the figure to ``target``."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    yield axes
    axes.set(title=title, xlabel="environment steps", ylabel="episode return", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc=legend)
    figure.savefig(target, dpi=120)
