"""What all benchmarks share: options, turns, worker processes, medians and ratios, and printing.

A benchmark declares its options and its contestants. The contestants take turns, so that a change of the machine's load
meets all of them alike. A figure is the median over the rounds. A ratio is the median of the ratios within one round.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from td3_robot.errors import EXIT_GOOD, NodeError, UsageError
from td3_robot.runtime.arguments import Parser
from td3_robot.util import machine

Report = dict[str, Any]
"""What a benchmark reports, as plain JSON values. The key ``machine`` describes the machine."""

_Name = TypeVar("_Name")
_Result = TypeVar("_Result")


class Options(Parser):
    """The options of one benchmark: ``--json``, and numbers with a lowest value.

    Args:
        command: how people call the benchmark.
        description: what it measures.
        examples: arguments for the examples in the help text.
    """

    def __init__(self, command: str, description: str, examples: Sequence[str] = ("", "--json")) -> None:
        lines = [f"  {command} {example}".rstrip() for example in examples]
        super().__init__(prog=command, description=description, epilog="\n".join(["examples:", *lines]))
        self.add_argument("--json", action="store_true", help="print one JSON object")
        self._lowest: dict[str, float] = {}

    def number(self, flag: str, default: Any, metavar: str, purpose: str, *, low: float = 1, **more: Any) -> None:
        """Add an option that takes a number, or a list of numbers if ``default`` is a list."""
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        shown = " ".join(map(str, default)) if several else default
        text = f"{purpose} (default: {shown})"
        self.add_argument(
            flag, type=kind, default=default, metavar=metavar, help=text, nargs="+" if several else None, **more
        )
        self._lowest[flag] = low

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse the arguments and check the numbers.

        Raises:
            UsageError: a number is too low, infinite or NaN.
        """
        options = self.parse_args(arguments)
        for flag, low in self._lowest.items():
            given = getattr(options, flag.removeprefix("--").replace("-", "_"))
            for value in given if isinstance(given, list) else [given]:
                if not low <= value < math.inf:
                    raise UsageError(f"{flag} is {value}; it must be at least {low}")
        return options


def describe(*packages: str) -> dict[str, Any]:
    """Describe this machine, with the versions of those packages that are installed."""
    return machine.describe([name for name in packages if machine.version(name)])


def take_turns(
    contestants: Mapping[_Name, Callable[[], _Result]], rounds: int, *, warm_up: bool = False
) -> dict[_Name, list[_Result]]:
    """Call every contestant once a round; each round begins with another one.

    Args:
        contestants: by name; each call makes one measurement.
        rounds: how many results to return for each contestant.
        warm_up: make one more round first and drop its results.
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


def seconds_of(run: Callable[[], object]) -> Callable[[], float]:
    """Wrap a function so that it returns how many seconds it took."""

    def timed() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return timed


def repeat_for(seconds: float, run: Callable[[int], object], block: int) -> tuple[int, float]:
    """Run blocks of calls until the time is over, at least one block.

    Args:
        seconds: the least time to run.
        run: makes that many calls.
        block: calls between two looks at the clock.

    Returns:
        The number of calls, and the seconds that they took.
    """
    calls, passed, begin = 0, 0.0, time.perf_counter()
    while not calls or passed < seconds:
        run(block)
        calls += block
        passed = time.perf_counter() - begin
    return calls, passed


def summary(unit: str, values: Sequence[float]) -> dict[str, float]:
    """Median (under the name of its unit), lowest and highest value."""
    return {unit: statistics.median(values), "lowest": min(values), "highest": max(values)}


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Median of the ratios of values from the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


PERCENTILES = f"{'µs':24} {'p50':>9} {'p99':>9} {'p99.9':>9} {'max':>10}"
"""Head of a table whose rows are :func:`percentile_row`."""


def percentiles(nanoseconds: Any) -> dict[str, float]:
    """Percentiles in µs of times in ns, an array or lists of any shape; ``p999`` is the 99.9th."""
    values = np.asarray(nanoseconds, np.float64) / 1e3
    p50, p99, p999 = np.percentile(values, (50, 99, 99.9))
    figures = {"p50": p50, "p99": p99, "p999": p999, "max": values.max()}
    return {name: round(float(value), 1) for name, value in figures.items()}


def percentile_row(name: str, figures: Mapping[str, float]) -> str:
    """One line of a table for people."""
    return f"{name:24} {figures['p50']:9.1f} {figures['p99']:9.1f} {figures['p999']:9.1f} {figures['max']:10.1f}"


class Worker:
    """A process for one contestant, which has its threads and its memory to itself. Use it as a context manager.

    Args:
        name: of the contestant, for errors.
        serve: runs in the process; it gets its end of a pipe first, then the ``arguments``.
    """

    def __init__(self, name: str, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()  # so that receive() notices when the process dies

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def send(self, value: object) -> None:
        self._pipe.send(value)

    def receive(self) -> Any:
        """Wait for the next value from the process.

        Raises:
            NodeError: the process died.
        """
        try:
            return self._pipe.recv()
        except EOFError:
            raise NodeError(f"the process of {self._name!r} died; its output says why") from None


def show(report: Report, as_json: bool, lines: Callable[[Report], Iterable[str]]) -> int:
    """Print a report as JSON, or as text that begins with the machine.

    Args:
        report: with the key ``machine``; ``not_measured`` maps a contestant to the reason why it is missing.
        as_json: print JSON.
        lines: makes the lines of the text that belong to this benchmark.

    Returns:
        The exit code.
    """
    if as_json:
        print(json.dumps(report, indent=2))
        return EXIT_GOOD
    computer = report["machine"]
    print(f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before")
    for kind, reason in report.get("not_measured", {}).items():
        print(f"not measured: {kind}: {reason}")
    for line in lines(report):
        print(line)
    return EXIT_GOOD
