"""Compare the speed of two checkouts of td3-robot: run ``td3-robot bench`` alternately in one and in the other.

    python benchmarks/versus.py --base DIR [BENCHMARK …] [--rounds 3] [--json] [-- ARGUMENTS]

Every round runs a benchmark once in both checkouts; the order alternates from round to round. The script divides the
speed of the new checkout (``--new``, by default the checkout of this script) by the speed of the base checkout. The
result is the median of this ratio over the rounds, with the lowest and the highest ratio. A ratio above 1 means that
the new checkout is faster. Arguments after ``--`` replace the arguments of the benchmark in ``BENCHMARKS``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from td3_robot.bench import harness
from td3_robot.errors import NodeError, UsageError

ROOT = Path(__file__).parents[1]
Figures = dict[str, tuple[float, str]]
"""Maps the name of a figure to its value and unit. A figure in µs or s is a time; all other figures are rates."""


def _rows(unit: str, label: Callable[[Mapping[str, Any]], str]) -> Callable[[harness.Report], Figures]:
    key = unit.replace("/", "_per_")
    return lambda report: {label(row): (row[key], unit) for row in report["results"]}


def _policy(report: harness.Report) -> Figures:
    robots = report["server_us"].items()
    figures = {f"{count} robots, {part}": (row["p50"], "µs") for count, rows in robots for part, row in rows.items()}
    deployed = {f"deployed, {part}": (report["deployed_us"][part]["p50"], "µs") for part in ("core", "all")}
    return {**figures, **deployed, "start to first action": (min(report["start"]["to_first_action_s"]), "s")}


def _link(report: harness.Report) -> Figures:
    rows = report["round_trip_us"].items()
    return {f"{robots} robots": (row["policy"]["p50"], "µs") for robots, row in rows}


def _sim(report: harness.Report) -> Figures:
    one = {f"{task}, one robot": (row["td3_robot"], "steps/s") for task, row in report["one_robot"].items()}
    fleets = {
        f"{task}, fleet of {size}": (row["td3_robot"], "steps/s")
        for task, rows in report["fleet"].items()
        for size, row in rows.items()
    }
    return {name: (row["steps_per_s"], unit) for name, (row, unit) in {**one, **fleets}.items()}


def _record(report: harness.Report) -> Figures:
    return {
        "message without a recorder": (report["tap_without_recorder_us"], "µs"),
        "message with a recorder": (report["tap_with_recorder_us"], "µs"),
        "recorder": (report["recorder_messages_per_s"], "messages/s"),
    }


BENCHMARKS: dict[str, tuple[list[str], Callable[[harness.Report], Figures]]] = {
    "learner": (
        ["--networks", "400-300", "--repetitions", "3"],
        _rows("updates/s", lambda row: f"{row['network']}, {row['kind']}, {row['threads']} threads"),
    ),
    "train": (
        ["--rounds", "1", "--steps", "2000"],
        _rows("steps/s", lambda row: f"{row['kind']}, {row['threads']} threads"),
    ),
    "policy": (["--actions", "5000", "--memory", "1000"], _policy),
    "link": (["--trips", "2000", "--seconds", "1"], _link),
    "sim": (["--rounds", "3", "--resets", "10"], _sim),
    "record": ([], _record),
    "replay": ([], lambda report: {"replay": (report["times_real_time_undisturbed"], "× real time")}),
}
"""For each benchmark: its arguments, and a function that takes the report and returns the figures to compare."""


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = harness.Options(
        "python benchmarks/versus.py",
        "Compare the speed of two checkouts of td3-robot.",
        ("--base ../base", "--base ../base learner --rounds 5 -- --threads 1 --networks 400-300"),
    )
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--base", type=Path, required=True, metavar="DIR", help="checkout to compare with")
    parser.add_argument("--new", type=Path, default=ROOT, metavar="DIR", help="checkout to measure (default: this one)")
    parser.number("--rounds", 3, "N", "runs of each checkout")
    options = parser.parse_args(words[:split])
    names, own = harness.chosen(parser, "benchmark", options.benchmarks, BENCHMARKS), words[split + 1 :]
    if own and len(names) != 1:
        raise UsageError("arguments after -- need exactly one BENCHMARK")
    report: harness.Report = {"machine": harness.describe("torch", "numpy", "pybullet"), "rounds": options.rounds}
    report["results"] = []
    for name in names:
        turns = {
            which: partial(run, folder.resolve(), name, own or BENCHMARKS[name][0])
            for which, folder in (("base", options.base), ("new", options.new))
        }
        taken = harness.take_turns(turns, options.rounds)
        report["results"] += compare(name, taken["base"], taken["new"])
    return harness.show(report, options.json, _lines)


def run(checkout: Path, name: str, arguments: Sequence[str]) -> Figures:
    """Run a benchmark in a checkout and return its figures.

    Raises:
        NodeError: the benchmark failed.
    """
    print(f"{checkout}: bench {name}", file=sys.stderr)
    sims = checkout / "sims"
    places = [checkout] if (sims / "__init__.py").exists() else [checkout, sims]  # in version 0.1.0, sims is a package
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-m", "td3_robot.cli.main", "bench", name, "--json", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodeError(f"bench {name} of {checkout} failed: {done.stderr.strip()[-2000:]}")
    return BENCHMARKS[name][1](json.loads(done.stdout))


def compare(name: str, base: Sequence[Figures], new: Sequence[Figures]) -> list[dict[str, Any]]:
    """Compare the figures that both checkouts have. The n-th items of ``base`` and ``new`` belong to the same round."""
    rows = []
    for figure, (_, unit) in base[0].items():
        if figure in new[0]:
            old, now = ([figures[figure][0] for figures in rounds] for rounds in (base, new))
            ratios = [b / a for a, b in zip(old, now, strict=True)]
            if unit in ("µs", "s"):
                ratios = [1 / value for value in ratios]
            row = {"benchmark": name, "figure": figure, "unit": unit}
            medians = {"base": statistics.median(old), "new": statistics.median(now)}
            rows.append({**row, **medians, **harness.summary("times_as_fast", ratios)})
    return rows


def _lines(report: harness.Report) -> Iterator[str]:
    yield f"{'benchmark and figure':42} {'base':>10} {'new':>10}               times as fast"
    for row in report["results"]:
        yield (
            f"{row['benchmark']:8} {row['figure']:33} {row['base']:10.1f} {row['new']:10.1f} {row['unit']:12} "
            f"{row['times_as_fast']:5.2f} [{row['lowest']:.2f}, {row['highest']:.2f}]"
        )


if __name__ == "__main__":
    harness.run_script(main)
