"""Draws the learning curve of a run."""

from __future__ import annotations

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
