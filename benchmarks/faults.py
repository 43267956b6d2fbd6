"""Inject faults into the processes of a training and of a robot. Measure what is lost, and when everything works again.

    python benchmarks/faults.py [--only FAULT/PROCESS/USE ...] [--out FILE] [--quick] [--json]
    python benchmarks/faults.py --report

A cell is a combination of a fault, the process that gets the fault, and a use of td3-robot. Each cell starts real
processes, injects its fault, and measures until the processes work again. The use ``train`` is a training of Walker2D
with a recorder. The use ``deploy`` is a robot with a recorder, at 50 Hz (on a lossy link at 5 Hz). The use ``record``
injects the fault into the recorder of such a robot. The cells of the faults ``cut``, ``lossy`` and ``disk`` need root.
Without root, these cells fail, and the table shows the reason.

The results go to FILE (default: benchmarks/results/reliability/faults.json). A run with ``--only`` keeps the other
cells of the file. ``--report`` writes the table into docs/explanation/reliability.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the helpers of the tests

from fault_robot import deploy
from fault_training import train
from faults_injected import Result
from reliability import DATA, FAULT_NAMES, write_faults

from td3_robot.bench import harness
from td3_robot.errors import Td3RobotError

FAULTS = tuple(FAULT_NAMES)
PROCESSES = ("simulator", "policy", "learner", "driver", "recorder", "supervisor")
USES = ("train", "deploy", "record")
Cell = tuple[str, str, str]

_ANY = "*"
_LEFT_OUT = (
    (
        _ANY,
        "simulator policy learner driver supervisor",
        "record",
        "the recorder also records the runs of 'train' and 'deploy': see the column 'not recorded' of their rows",
    ),
    (
        _ANY,
        "recorder",
        "train deploy",
        "no other process waits for the recorder; the rows with the use 'record' show the effect on the robot",
    ),
    (_ANY, "driver", "train", "a training has simulators"),
    (_ANY, "simulator supervisor", "deploy", "a deployment has no such process"),
    (
        "cut lossy",
        _ANY,
        "train",
        "the processes of a training on one machine have Unix sockets and no network",
    ),
    ("cut lossy", "policy", "deploy", "the link is the same as the driver's"),
    ("disk", "driver simulator", _ANY, "the process writes no file"),
    ("disk", "learner", "deploy", "the process writes no file"),
    ("disk", "policy supervisor", "train", "all processes of a run write to one disk: see the learner"),
    (
        "clock",
        "simulator policy learner",
        "train",
        "all processes of a training on one machine have one clock: see the supervisor",
    ),
    ("clock", "learner", "deploy", "the clock of the learner has the same effect as that of the policy server"),
)
"""Cells that faults.py leaves out.

A row has faults, processes, uses and a reason. The first row that fits a cell gives the reason for this cell.
"""


def left_out(cell: Cell) -> str:
    """Return why a cell is left out. The text is empty if the cell is measured."""
    rows = (
        why
        for *row, why in _LEFT_OUT
        if all(values == _ANY or value in values.split() for values, value in zip(row, cell, strict=True))
    )
    return next(rows, "")


RUN: dict[str, Callable[[str, str, Path, int], Result]] = {"train": train, "deploy": deploy, "record": deploy}


def measure(cell: Cell, steps: int) -> Result:
    """Run a cell. If it fails, the result has the key ``failed`` with the first line of the error."""
    fault, process, use = cell
    with tempfile.TemporaryDirectory(prefix="td3-robot-fault-", ignore_cleanup_errors=True) as folder:
        try:
            return RUN[use](fault, process, Path(folder), steps)
        except (AssertionError, OSError, KeyError, Td3RobotError, subprocess.SubprocessError) as error:
            print(f"{'/'.join(cell)}: {error}", file=sys.stderr)
            return {"failed": (str(error).splitlines() or [type(error).__name__])[0][:200]}


def main() -> int:
    parser = harness.Options(
        "python benchmarks/faults.py", "Measure the effect of each fault.", ("--only stop/policy/deploy",)
    )
    parser.add_argument("--only", nargs="+", metavar="CELL", help="cells FAULT/PROCESS/USE; * stands for every value")
    parser.add_argument("--out", type=Path, default=DATA / "faults.json", metavar="FILE", help="file of the results")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="wait less before the fault; in a training, also wait less after the fault",
    )
    parser.add_argument("--report", action="store_true", help="only write the table of FILE into reliability.md")
    options = parser.parse_args()
    if options.report:
        write_faults(options.out)
        return 0
    cells = [(fault, process, use) for fault in FAULTS for use in USES for process in PROCESSES]
    wanted = options.only or ["*/*/*"]
    chosen = [
        cell for cell in cells if not left_out(cell) and any(fnmatchcase("/".join(cell), text) for text in wanted)
    ]
    if not chosen:
        parser.error(f"--only is {options.only}; no cell matches it")
    report: harness.Report = {"machine": harness.describe("td3-robot", "numpy", "pyzmq"), "cells": {}}
    if options.out.exists():
        earlier = json.loads(options.out.read_text())
        others = set(earlier["cells"]) - set(map("/".join, chosen))
        machines = [harness.hardware(it["machine"]) for it in (earlier, report)]
        if others and machines[0] != machines[1]:
            found = f"{options.out} was measured on {machines[0]}; this machine is {machines[1]}"
            parser.error(f"{found}; measure all cells, or name another --out")
        report["cells"] = earlier["cells"]
    report["left_out"] = {"/".join(cell): why for cell in cells if (why := left_out(cell))}
    for cell in chosen:
        report["cells"]["/".join(cell)] = measure(cell, 200 if options.quick else 1000)
        made = {*report["cells"], *report["left_out"]}
        names = list(map("/".join, cells))
        report["cells"] = {name: report["cells"][name] for name in names if name in report["cells"]}
        report["not_run"] = [name for name in names if name not in made]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return harness.show(report, options.json, _lines)


def _lines(report: harness.Report) -> Iterator[str]:
    for cell, result in report["cells"].items():
        yield f"{cell:<28} " + ", ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
        )


if __name__ == "__main__":
    harness.run_script(main)
