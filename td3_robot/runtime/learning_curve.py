"""Draws the learning curve of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from td3_robot.runtime.metrics import read


def draw(metrics: Path, target: Path, title: str) -> None:
    """Draw training returns and evaluation returns (mean ± standard deviation) over environment steps.

    Args:
        metrics: the run's ``metrics.jsonl``.
        target: image file to write.
        title: title of the figure.

    Raises:
        OSError: a file cannot be read or written.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [record for record in read(metrics, "train") if "return_mean" in record]
    axes.plot(
        [record["env_steps"] for record in train],
        [record["return_mean"] for record in train],
        color="0.7",
        label="training episodes, with noise (mean of 20)",
    )
    evaluations = read(metrics, "evaluation")
    steps = [record["env_steps"] for record in evaluations]
    means = [record["eval_return_mean"] for record in evaluations]
    stds = [record["eval_return_std"] for record in evaluations]
    axes.plot(steps, means, "o-", markersize=3, color="C0", label="evaluation, no noise (mean ± std)")
    low = [mean - std for mean, std in zip(means, stds, strict=True)]
    high = [mean + std for mean, std in zip(means, stds, strict=True)]
    axes.fill_between(steps, low, high, color="C0", alpha=0.2, linewidth=0)
    axes.set(title=title, xlabel="environment steps", ylabel="episode return", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(target, dpi=120)


def draw_bands(bands: Mapping[str, Mapping[str, Sequence[float]]], target: Path, title: str) -> None:
    """Draw a curve with its band for each group of runs.

    Args:
        bands: label of the group, mapped to ``env_steps``, ``mean``, ``low`` and ``high``.
        target: image file to write.
        title: title of the figure.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (label, band) in enumerate(bands.items()):
        color = f"C{number}"
        axes.plot(band["env_steps"], band["mean"], "o-", markersize=3, color=color, label=label)
        axes.fill_between(band["env_steps"], band["low"], band["high"], color=color, alpha=0.2, linewidth=0)
    axes.set(title=title, xlabel="environment steps", ylabel="episode return", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(target, dpi=120)
