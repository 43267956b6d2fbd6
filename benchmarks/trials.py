"""Make the trainings of trials.yaml, which look for better settings. Write all their learning curves to one file.

    python benchmarks/trials.py [TRIAL …] [--out runs/trials] [--collect]

The script skips finished trainings and resumes interrupted ones, so you can stop and start it at any time.
It writes ``results/data/trials.json`` and the tables in docs/explanation/results.md. With ``--collect``, it trains
nothing, and writes the evaluations made so far.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from reliability import insert

import td3_robot as tr
from td3_robot.bench import harness
from td3_robot.runtime.arguments import Parser
from td3_robot.runtime.run_folder import RunFolder

HERE = Path(__file__).parent
FILE = HERE / "results" / "data" / "trials.json"
PAGE = HERE.parent / "docs" / "explanation" / "results.md"
COLUMNS = {
    ("walker2d",): (20_000, 30_000, 35_000, 50_000, 100_000, 200_000, 300_000),
    ("walker2d_fast", "ant", "halfcheetah", "hopper"): (100_000, 200_000, 300_000, 500_000, 800_000, 1_000_000),
}
"""The shipped configurations that share a table, and the numbers of steps in the head of the table."""

Curve = list[list[float]]


@cache
def trials() -> dict[str, dict[str, Any]]:
    """Return the trials by name, see trials.yaml."""
    content: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "trials.yaml").read_text(encoding="utf-8"))
    return content


def main() -> int:
    known = trials()
    parser = Parser(description=__doc__)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"trials (default: all): {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("runs/trials"), metavar="DIR", help="folder of all runs")
    parser.add_argument("--collect", action="store_true", help="train nothing, write the curves so far")
    options = parser.parse_args()
    for name in harness.chosen(parser, "trial", options.trials, known):
        for seed in known[name]["seeds"]:
            folder = options.out / f"{name}-{seed}"
            if not options.collect:
                train(known[name], seed, folder)
            if (folder / "metrics.jsonl").is_file():
                keep(f"{name}-{seed}", curve(folder))
    insert("trials", tables(), PAGE)
    return 0


def train(trial: dict[str, Any], seed: int, folder: Path) -> None:
    """Begin or resume a training; end it after the trial's number of steps."""

    def goes_on(progress: tr.TrainingProgress) -> bool:
        # If ``stops_at`` is ``total_steps``, let the training end by itself. Then it also makes its last evaluation.
        return progress.env_steps < trial["stops_at"] or trial["stops_at"] == trial["set"].get("total_steps")

    if not (folder / "config.yaml").is_file():
        tr.train(trial["config"], seed=seed, out=folder, overrides=trial["set"], callback=goes_on)
    elif RunFolder(folder).steps_made() < trial["stops_at"]:
        tr.open_run(folder).resume(callback=goes_on)


def curve(folder: Path) -> Curve:
    """Return the evaluations of a training: environment steps, mean return and mean length of the episodes."""
    names = ("eval_return_mean", "eval_length_mean")
    return [[item["env_steps"], *(round(item[name], 1) for name in names)] for item in tr.open_run(folder).metrics()]


def keep(training: str, points: Curve) -> None:
    """Write a curve to the file of all curves, one training per line."""
    curves = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    curves[training] = points
    harness.write_result(FILE, dict(sorted(curves.items())))


def tables() -> list[str]:
    """Lines of Markdown: tables with evaluations of the trials at some numbers of steps."""
    curves = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    if lost := {trial["config"] for trial in trials().values()}.difference(*COLUMNS):
        raise ValueError(f"no table shows the trials of {', '.join(sorted(lost))}; add them to COLUMNS")
    return "\n\n".join(_table(configs, curves) for configs in COLUMNS).split("\n")


def _table(configs: tuple[str, ...], curves: dict[str, Curve]) -> str:
    columns = COLUMNS[configs]
    lines = [
        f"| trial | {' | '.join(f'{steps // 1000}k' for steps in columns)} |",
        f"|---|{'--:|' * len(columns)}",
    ]
    for name, trial in trials().items():
        if trial["config"] in configs:
            found = [curves.get(f"{name}-{seed}", []) for seed in trial["seeds"]]
            cells = [", ".join(_at(points, steps) for points in found) for steps in columns]
            lines.append(f"| {trial['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _at(points: Curve, steps: int) -> str:
    """The evaluation at about this number of steps: mean return and reward per step. Without an evaluation: a dash."""
    near = [f"{total:.0f} ({total / length:.1f})" for made, total, length in points if abs(made - steps) < 1000]
    return near[0] if near else "–"


if __name__ == "__main__":
    harness.run_script(main)
