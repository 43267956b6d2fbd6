"""Compare the automatic choice of threads and precision with fixed choices.

The figures are environment steps per second of a training.

    python benchmarks/auto_choice.py [--threads 1 2] [--steps 3000] [--rounds 3] [--json]

The trainings are those of ``td3-robot bench train``. The figures exclude the time in which ``auto`` measures the
speed of each choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from td3_robot.bench import harness, train
from td3_robot.bench.train import Contestants

AUTO: Any = "auto"


def main() -> int:
    description = "Compare the automatic choice of threads and precision with fixed choices. Takes minutes."
    options = train.options("python benchmarks/auto_choice.py", description).parse_args()
    report = train.measure(options, partial(automatic, "auto" if options.no_compile else "compiled auto"))
    compare(report["results"])
    return harness.show(report, options.json, lines)


def automatic(kind: str, *, threads: Any, **sizes: Any) -> Contestants:
    del threads
    return {(kind, AUTO): partial(train.ours, kind, threads=AUTO, **sizes)}


def compare(results: list[dict[str, Any]]) -> None:
    """Divide each speed by the speed of the fixed choice with the highest median."""
    fixed = [row for row in results if row["threads"] != AUTO]
    best = max(fixed, key=lambda row: float(row["steps_per_s"]))
    for row in results:
        row["over_best_fixed"] = harness.ratio(row["rounds"], best["rounds"])


def lines(report: harness.Report) -> Iterator[str]:
    for row, line in zip(report["results"], train.lines(report), strict=True):
        yield f"{line}  {row['over_best_fixed']:5.2f} × the best fixed choice"


if __name__ == "__main__":
    harness.run_script(main)
