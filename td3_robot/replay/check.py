"""``td3-robot replay``: feeds recorded inputs to the cores, and reports outputs that differ from the recording."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, EXIT_USAGE, Td3RobotError, UsageError
from td3_robot.messages import Action, Start, Step, Turn, wire_fields
from td3_robot.recording.reader import Session
from td3_robot.replay import machines, rewrite
from td3_robot.replay.compare import Comparison, compare, plot
from td3_robot.replay.outcome import Outcome, Replayed
from td3_robot.runtime.arguments import Parser
from td3_robot.runtime.progress import Working
from td3_robot.util.extras import import_user_module, missing
from td3_robot.util.text import printable

CORES: dict[str, str] = {
    "policy": "td3_robot.replay.policy",
    "driver": "td3_robot.replay.driver",
    "simulator": "td3_robot_sims.replay",
    "learner": "td3_robot.replay.learner",
}
"""The module of each core, by name. A module has a function ``replay(session)``.

The table has names of modules instead of modules, because td3_robot must not import simulators.
"""
_EXAMPLES = """examples:
  td3-robot replay tests/replay/sessions/*.mcap
  td3-robot replay session.mcap --core policy --json
  td3-robot replay session.mcap --update         show the differences, and store the new outputs as the expected outputs

Exit codes:
  0  all compared outputs are as expected, or --update has stored the new outputs as the expected outputs
  1  an output differs, or nothing could be checked
  2  a file cannot be read, replayed or rewritten (the other files are still replayed), or an argument is wrong
"""

Replay = Callable[[Session], Outcome]
_FIELDS = {**wire_fields(Step), **wire_fields(Action)}
_TOLERANCES = ", ".join(f"{name} {wire.tolerance:g}" for name, wire in _FIELDS.items() if wire.tolerance)


def check(
    session: Session, cores: Sequence[str] = (), *, exact: bool | None = None, working: Working | None = None
) -> list[Outcome]:
    """Replay a session through the named cores. Without names, use all installed cores.

    Args:
        exact: True requires the same bits. False allows differences within the tolerance. None requires the same bits
            only if the expected outputs come from a machine like this one, with the same package versions.
        working: shows the core that runs, and the share of the current file that replay has read.

    Raises:
        SessionError: the recording is damaged, or a core fails on its inputs.
        ConfigError: this version does not understand the configuration of the recording.
        UsageError: a named core is not installed.
    """
    reports = []
    # If the recording leaves out policies, the learner comes first: it computes the policies that the other cores need.
    for name in sorted(cores or CORES, key=lambda name: session.left_out and name != "learner"):
        if working:
            working.show(f"replay {session.paths[0]}: {name}", lambda: session.read_share)
        try:
            replay: Replay = importlib.import_module(CORES[name]).replay
        except ModuleNotFoundError as error:
            problem = missing(error)
            if problem is None:
                raise
            if cores:
                raise UsageError(f"--core {name} {problem}") from None
            reports.append(Outcome(core=name, notes=[problem]))
            continue
        begin = time.perf_counter()
        report = replay(session)
        report.core, report.taken_s = name, time.perf_counter() - begin
        report.parts = [rewrite.expected(session, part) for part in report.parts]
        for part in report.parts:
            _compare(session, part, exact, report)
        reports.append(report)
    return reports


def _compare(session: Session, part: Replayed, exact: bool | None, report: Outcome) -> None:
    if not part.expected and not part.got:
        return
    other = None if exact is not None else machines.difference(part.made or session.metadata, part.packages)
    bits = exact if exact is not None else other is None
    expected = [message for _, message in part.expected]
    comparison = compare(part.topic, expected, part.got, exact=bits, where=part.where)
    within = f"within tolerance ({other + '; ' if other else ''}{_TOLERANCES})"
    report.add(comparison, "bit for bit" if bits else within)
    times = [entry.received for entry, _ in part.expected if entry]
    report.recorded_s = max(report.recorded_s, (max(times) - min(times)) * 1e-9 if times else 0.0)


def main(arguments: Sequence[str]) -> int:
    about = "Run the policy server, drivers, simulators and the learner on recorded inputs, and compare their outputs."
    parser = Parser(prog="td3-robot replay", description=about, epilog=_EXAMPLES)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="recordings; each file is one session")
    add("--core", action="append", default=[], choices=list(CORES), help="replay only this core (repeatable)")
    add("--parts", action="store_true", help="the files are the parts of one session")
    words = "require bit-for-bit equality, even if the recording comes from another machine"
    add("--exact", action="store_true", default=None, help=words)
    add("--update", action="store_true", help="show differences, then rewrite the files")
    words = "first import this module, which registers your own task (repeatable)"
    add("--import", action="append", default=[], dest="modules", metavar="MODULE", help=words)
    add("--verbose", action="store_true", help="also show the warnings of replayed cores")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING if options.verbose else logging.CRITICAL, format="%(message)s")
    logging.captureWarnings(True)
    if options.parts and options.update:
        raise UsageError("--update cannot rewrite a session of several files; leave out --parts")
    for module in options.modules:
        if problem := import_user_module(module):
            raise UsageError(f"--import {module}: {problem}")
    sessions = [options.files] if options.parts else [[file] for file in options.files]
    results = [_replay(paths, options) for paths in sessions]
    if options.json:
        same = all(good for _, good, _ in results)
        print(json.dumps({"same": same, "sessions": [report for _, _, report in results]}, indent=2))
    return max(code for code, _, _ in results)


def _replay(paths: Sequence[Path], options: argparse.Namespace) -> tuple[int, bool, dict[str, Any]]:
    """Replay one session and print its report. Returns the exit code, whether replay passed, and the JSON report."""
    try:
        with Working(f"replay {paths[0]}") as working:
            session = Session(paths)
            reports = check(session, options.core, exact=options.exact, working=working)
        parts = [part for report in reports for part in report.parts]
        written = rewrite.rewrite(session, parts) if options.update else ""
    except UsageError:
        raise
    except (Td3RobotError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError) and error.filename == str(paths[0]):
            problem = f"{error.filename}: {error.strerror}"
        named = "" if str(paths[0]) in problem else f"{paths[0]}: "
        print(f"td3-robot replay: {named}{problem}", file=sys.stderr)
        return EXIT_USAGE, False, {"file": str(paths[0]), "same": False, "error": problem}
    if not options.json:
        print(text(session, reports))
    if written:
        print(f"{paths[0]}: rewritten, {written}", file=sys.stderr if options.json else sys.stdout)
    good = passed(reports)
    return EXIT_GOOD if good or written else EXIT_CHECK_FAILED, good, as_json(session, reports)


def passed(reports: Sequence[Outcome]) -> bool:
    """Whether replay compared at least one message, and no output differs."""
    return any(report.compared for report in reports) and all(report.same for report in reports)


def not_compared(session: Session, reports: Sequence[Outcome]) -> dict[str, int]:
    """The number of messages that replay did not compare, by topic. Start and Turn do not count: they are inputs."""
    left: Counter[str] = Counter()
    for (_, _, topic), count in session.counts.items():
        left[topic] += count if topic not in (Start.NAME, Turn.NAME) else 0
    for report in reports:
        for comparison, _ in report.comparisons:
            left[comparison.topic] -= comparison.compared
    return dict(sorted((+left).items()))


def text(session: Session, reports: Sequence[Outcome]) -> str:
    """Return the report as text: the equal messages, the differences, and the unchecked messages."""
    path = session.paths[0]
    lines = [f"{path}: the same {how}: {'; '.join(cores)}" for how, cores in _same(reports).items()]
    for report in reports:
        for comparison, how in report.comparisons:
            if not comparison.same:
                lines += _difference_lines(f"{path}: {report.core}: ", comparison, how)
    unchecked = [f"{report.core}: {note}" for report in reports for note in report.notes]
    if left := not_compared(session, reports):
        unchecked.append(_counted(left.items()))
    if unchecked:
        lines.append(f"{path}: not checked: {'; '.join(unchecked)}")
    if not any(report.compared for report in reports):
        lines.append(f"{path}: NOTHING could be checked")
    return "\n".join(map(printable, lines))


def _same(reports: Sequence[Outcome]) -> dict[str, list[str]]:
    """Return one text per core: its turns, and its topics without differences.

    The texts are grouped by the way of comparing, such as "bit for bit".
    """
    lines: dict[str, list[str]] = {}
    for report in reports:
        found: dict[str, list[Comparison]] = {}
        for comparison, how in report.comparisons:
            if comparison.same:
                found.setdefault(how, []).append(comparison)
        turns = f" ({report.turns} turns)" if report.turns else ""
        for how, comparisons in found.items():
            counts = _counted((comparison.topic, comparison.compared) for comparison in comparisons)
            lines.setdefault(how, []).append(f"{report.core}{turns}: {counts}")
    return lines


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {topic}" for topic, count in counts)


def _difference_lines(head: str, comparison: Comparison, how: str) -> list[str]:
    counts, first = _counted(comparison.counts.most_common()), comparison.first[0]
    lines = [
        f"{head}{comparison.topic} DIFFERS: {counts} (of {comparison.compared} compared {how})",
        f"  first at {comparison.topic} {first.message}: {first.field}",
        f"    expected {first.expected}",
        f"    got      {first.got}",
    ]
    if worst := comparison.worst():
        lines += [f"  error of {worst} over the messages:", *(f"  {line}" for line in plot(comparison.errors[worst]))]
    return lines


def as_json(session: Session, reports: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "file": str(session.paths[0]),
        "same": passed(reports),
        "not_compared": not_compared(session, reports),
        "cores": {
            report.core: {
                "recorded_s": round(report.recorded_s, 3),
                "taken_s": round(report.taken_s, 3),
                "turns": report.turns,
                "not_checked": report.notes,
                "topics": [
                    {
                        "topic": comparison.topic,
                        "how": how,
                        "compared": comparison.compared,
                        "differences": dict(comparison.counts),
                        "first": [vars(item) for item in comparison.first],
                    }
                    for comparison, how in report.comparisons
                ],
            }
            for report in reports
        },
    }
