"""Functions for all benchmarks: options, turns, worker processes, medians and ratios, and printing.

A benchmark compares contestants, for example kinds of update. They take turns, so that a change of the machine's load
affects all of them alike.
:func:`summary` gives the median over all rounds, and :func:`ratio` gives the median of the ratios of all rounds.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from td3_robot.errors import EXIT_GOOD, EXIT_USAGE, NodeError, Td3RobotError, exit_code_of
from td3_robot.runtime.arguments import Parser, integer, real
from td3_robot.util import files, machine
from td3_robot.util.text import one_line

Report = dict[str, Any]
"""The results of a benchmark, as plain JSON values. The key ``machine`` describes the machine."""

_LOAD = machine.load()  # at the import, before the benchmark adds its own load
_Name = TypeVar("_Name")
_Result = TypeVar("_Result")


class Options(Parser):
    """The options of one benchmark: ``--json``, and options for numbers. Each number has a lowest value.

    Args:
        command: the command line that runs the benchmark.
        description: what the benchmark measures.
        examples: arguments for the examples in the help text.
    """

    def __init__(self, command: str, description: str, examples: Sequence[str] = ("", "--json")) -> None:
        lines = [f"  {command} {example}".rstrip() for example in examples]
        super().__init__(prog=command, description=description, epilog="\n".join(["examples:", *lines]))
        self.add_argument("--json", action="store_true", help="print one JSON object")

    def number(self, flag: str, default: Any, metavar: str, purpose: str, *, low: float = 1) -> None:
        """Add an option for a number of at least ``low``, or for a list of such numbers if ``default`` is a list."""
        several = isinstance(default, list)
        kind = integer(int(low)) if isinstance(default[0] if several else default, int) else real(low)
        shown = " ".join(map(str, default)) if several else default
        nargs = "+" if several else None
        self.add_argument(
            flag, type=kind, default=default, metavar=metavar, help=f"{purpose} (default: {shown})", nargs=nargs
        )


def chosen(parser: Parser, what: str, names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return ``names``, or all known names if ``names`` is empty. An unknown name ends the script with a usage error.

    ``what`` is the kind of these names, for example ``row``. The error shows it.
    """
    known = list(known)
    for name in names:
        if name not in known:
            parser.error(f"the {what} is {name!r}; allowed: {', '.join(known)}")
    return list(names) or known


def run_script(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark script, and exit. An expected error becomes one line and an exit code, as in ``td3-robot``."""
    try:
        sys.exit(main())
    except (Td3RobotError, ModuleNotFoundError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", EXIT_USAGE))
    except KeyboardInterrupt:
        sys.exit(exit_code_of(signal.SIGINT))


def describe(*packages: str) -> dict[str, Any]:
    """Describe this machine, and each of ``packages`` that is installed.

    The key ``load`` of the result holds the machine's load when the benchmark started.
    """
    return {**machine.describe([name for name in packages if machine.version(name)]), "load": _LOAD}


def hardware(described: Mapping[str, Any]) -> str:
    """Return the processor and the number of cores of a machine from :func:`describe`, as text."""
    return f"{described['processor']}, {described['cores']} cores"


def take_turns(
    contestants: Mapping[_Name, Callable[[], _Result]], rounds: int, *, warm_up: bool = False
) -> dict[_Name, list[_Result]]:
    """Call every contestant once in each round. The first contestant changes from round to round. Return all results.

    ``warm_up`` adds a first round. The function drops the results of this round.
    """
    names = list(contestants)
    results: dict[_Name, list[_Result]] = {name: [] for name in names}
    for number in range(-1 if warm_up else 0, rounds):
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            result = contestants[name]()
            if number >= 0:
                results[name].append(result)
    return results


def repeat_for(seconds: float, run: Callable[[int], object], block: int) -> tuple[int, float]:
    """Repeat ``run(block)``, at least once and for at least this many seconds. Each run makes ``block`` calls.

    Returns:
        The number of calls, and their total time in s.
    """
    calls, passed, begin = 0, 0.0, time.perf_counter()
    while not calls or passed < seconds:
        run(block)
        calls += block
        passed = time.perf_counter() - begin
    return calls, passed


def summary(unit: str, values: Sequence[float]) -> dict[str, Any]:
    """Return median, lowest value, highest value, and all values (``rounds``). ``unit`` is the key of the median."""
    return {unit: statistics.median(values), "lowest": min(values), "highest": max(values), "rounds": list(values)}


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the median of the ratios ``ours / theirs`` of all rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


PERCENTILES = f"{'µs':24} {'p50':>9} {'p99':>9} {'p99.9':>9} {'max':>10}"  # header of a table of percentile_row()


def percentiles(nanoseconds: Any) -> dict[str, float]:
    """Return percentiles and maximum (µs) of an array of times (ns). ``p999`` is the 99.9th percentile."""
    values = np.asarray(nanoseconds, np.float64) / 1e3
    p50, p99, p999 = np.percentile(values, (50, 99, 99.9))
    figures = {"p50": p50, "p99": p99, "p999": p999, "max": values.max()}
    return {name: round(float(value), 1) for name, value in figures.items()}


def percentile_row(name: str, figures: Mapping[str, float]) -> str:
    return f"{name:24} {figures['p50']:9.1f} {figures['p99']:9.1f} {figures['p999']:9.1f} {figures['max']:10.1f}"


@contextlib.contextmanager
def process_of(name: str) -> Iterator[Callable[..., Any]]:
    """Start a process for one contestant, with its own threads and memory.

    Yield a function ``call(f, *arguments)``, which calls ``f`` in that process.

    Raises:
        NodeError: a call failed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return pool.submit(function, *arguments).result()
            except Exception as error:
                raise NodeError(f"{name} failed: {type(error).__name__}: {one_line(error, 500)}") from error

        yield call


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, with one line for each key. A kill during the write leaves the earlier file."""
    lines = (f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in result.items())
    files.write_atomically(file, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def show(report: Report, as_json: bool, lines: Callable[[Report], Iterable[str]]) -> int:
    """Print a report as JSON, or as text with the machine in the first line. Return the exit code.

    Args:
        report: must have the key ``machine``. The key ``not_measured``, if present, maps the name of each contestant
            without a result to the reason.
        lines: returns this benchmark's part of the text.
    """
    if as_json:
        print(json.dumps(report, indent=2))
        return EXIT_GOOD
    computer = report["machine"]
    print(f"{hardware(computer)}, load {computer['load']} at the start")
    for kind, reason in report.get("not_measured", {}).items():
        print(f"not measured: {kind}: {reason}")
    for line in lines(report):
        print(line)
    return EXIT_GOOD
