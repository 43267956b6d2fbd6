"""Make the tables and the charts of the results from the files in ``data``.

    python benchmarks/results/report.py [--check]

The script writes a table between the marks in README.md, and another in docs/explanation/results.md. The table in
README.md has only the rows of rows.yaml with ``readme: true``. The other table has every row.
The charts go to docs/images/results_CHART.png. ``--check`` writes nothing; its exit code is 1 if a table does not match
the data.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from run import result_file, rows

from td3_robot.runtime.arguments import Parser

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- results: made by benchmarks/results/report.py -->", "<!-- end of results -->"
PAGES = {"README.md": False, "docs/explanation/results.md": True}  # True: the page has every row

Result = dict[str, Any]


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only check that the pages are up to date")
    options = parser.parse_args()
    results = {name: read(name) for name in rows()}
    stale = []
    for page, every in PAGES.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            print(f"report.py: {page} has no lines {BEGIN!r} and {END!r}", file=sys.stderr)
            return 2
        new = f"{before}{BEGIN}\n{table(results, every=every)}\n{END}{after}"
        if new != text:
            stale.append(page)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if options.check and stale:
        print(f"report.py: out of date: {', '.join(stale)}; run benchmarks/results/report.py")
        return 1
    if not options.check:
        for name in sorted({name for row in rows().values() for name in row["charts"]}):
            chart(name, results)
    return 0


def read(row: str) -> list[Result]:
    """Return the existing results of a row."""
    files = (result_file(row, seed) for seed in rows()[row]["seeds"])
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def table(results: dict[str, list[Result]], *, every: bool) -> str:
    """Make a table in Markdown: of every row, or only of the rows with ``readme: true``."""
    lines = [
        "| system | steps | updates | final policy, by seed | mean | must reach | best policy | wall-clock |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for name, row in rows().items():
        if every or row.get("readme"):
            lines.append(_line(row, results[name]))
    return "\n".join(lines)


def _line(row: dict[str, Any], results: list[Result]) -> str:
    whole = [result for result in results if not result["partial"]]
    shown = [result for result in results if "final" in result]
    if not shown:
        return f"| {row['title']} | | | not trained yet | | {row.get('bar', '')} | | |"
    by_seed = ", ".join(
        f"{result['final']['mean']:.0f} ± {result['final']['std']:.0f}" + (" (partial)" if result["partial"] else "")
        for result in shown
    )
    mean = statistics.fmean(result["final"]["mean"] for result in shown)
    # A training without evaluations has no best policy.
    best = [result["best"]["mean"] for result in shown if "best" in result]
    complete = len(whole) == len(row["seeds"])
    missed = complete and mean < row.get("bar", mean)
    verdict = " (missed)" if missed else "" if complete else " (not complete)"
    steps, updates = (max(result["final"][key] for result in shown) for key in ("env_steps", "updates"))
    minutes = statistics.fmean(result["wall_s"] for result in shown) / 60
    return (
        f"| {row['title']} | {steps:,} | {updates:,} | {by_seed} | {mean:.0f}{verdict} | {row.get('bar', '')} | "
        f"{f'{statistics.fmean(best):.0f}' if best else ''} | {minutes:.0f} min |"
    )


def chart(name: str, results: dict[str, list[Result]]) -> None:
    """Draw one chart: a learning curve per seed, a colour per row, and a dashed line for the required return."""
    drawn = {title: results[title] for title, row in rows().items() if name in row["charts"] and results[title]}
    if not drawn:
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, (title, found) in enumerate(drawn.items()):
        for number, result in enumerate(found):
            steps, means = [[point[column] for point in result["curve"]] for column in (0, 1)]
            label = rows()[title]["title"] + (" (partial)" if any(item["partial"] for item in found) else "")
            axes.plot(steps, means, color=f"C{colour}", linewidth=1, label=None if number else label)
    bars = {rows()[title]["bar"] for title in drawn if "bar" in rows()[title]}
    for bar in bars:
        axes.axhline(bar, color="0.4", linestyle="--", linewidth=1, label=f"must reach {bar}")
    axes.set(xlabel="environment steps", ylabel="mean return of an evaluation", xlim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(ROOT / "docs" / "images" / f"results_{name}.png", dpi=100)


if __name__ == "__main__":
    sys.exit(main())
