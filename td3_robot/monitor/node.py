"""``td3-robot monitor``: shows live messages of a run or robot on the terminal, as JSON, in PlotJuggler or Foxglove."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from td3_robot.errors import UsageError
from td3_robot.messages import Message, Record
from td3_robot.monitor.core import Listener, Monitor
from td3_robot.monitor.plotjuggler import PlotJuggler
from td3_robot.recording.entries import Entry
from td3_robot.recording.faults import line
from td3_robot.recording.poses import read_links
from td3_robot.recording.values import Names
from td3_robot.runtime.arguments import Parser, integer, node_parser, real
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.topics import MONITOR
from td3_robot.util.output import say
from td3_robot.util.text import one_line

ACCEPTS: dict[str, tuple[type[Message], ...]] = {"node": (Record,)}
"""Maps each role of a client to the messages that a monitor accepts from this client."""
_CLEAR = "\x1b[H\x1b[2J"  # ECMA-48: move the cursor to the upper left corner, erase everything
FOXGLOVE_PORT = 8765
"""The port at which Foxglove and Lichtblick look for a server."""
_WIDTH = 200  # longest line, in characters
_EXAMPLES = """examples:
  td3-robot monitor --run runs/walker2d
  td3-robot monitor --run runs/walker2d --json --seconds 10
  td3-robot monitor --run runs/walker2d --plotjuggler tcp://127.0.0.1:9872    (PlotJuggler: ZMQ Subscriber, MessagePack)
  td3-robot monitor --run runs/walker2d --foxglove                            (Foxglove, Lichtblick: Open connection)
  td3-robot monitor --config robot.yaml            watches a deployed policy server and robot
  td3-robot monitor --endpoint ipc:///tmp/monitor.sock & td3-robot play walk.mcap --monitor ipc:///tmp/monitor.sock

Up to 32 programs can watch one run or one robot on this machine: monitors, dashboards and 'td3-robot topic' commands.
No node waits for these programs. Messages that a monitor misses appear as gaps. A monitor ends with the run, or at
Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    seconds = real(above=True, unit="s")
    description = "Watch the messages of nodes. No node waits for the monitor."
    parser = watcher_parser("td3-robot monitor", description, _EXAMPLES)
    parser.add_argument(
        "--every", type=seconds, default=1.0, metavar="S", help="seconds between reports (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=seconds, metavar="S", help="end after S seconds")
    parser.add_argument("--json", action="store_true", help="print each report as a line of JSON")
    parser.add_argument(
        "--plotjuggler", metavar="ENDPOINT", help="publish all numbers at this endpoint, for PlotJuggler"
    )
    parser.add_argument(
        "--foxglove",
        nargs="?",
        type=integer(0, 65535),
        const=FOXGLOVE_PORT,
        metavar="PORT",
        help="serve Foxglove and Lichtblick on this machine (default: 8765; 0 for a free port)",
    )
    parser.add_argument(
        "--links", metavar="FILE", help="for --foxglove: file that describes the links (rigid parts) of your robot"
    )
    parser.add_argument(
        "--anywhere", action="store_true", help="allow other machines to read the endpoint of --plotjuggler"
    )
    options = parser.parse_args(arguments)
    if options.anywhere and not options.plotjuggler:
        raise UsageError("--anywhere needs --plotjuggler")
    if options.links and options.foxglove is None:
        raise UsageError("--links needs --foxglove")
    if options.links:
        read_links(options.links)
    return run_node(MONITOR, options, lambda node: _watch(node, options))


def _watch(node: Node, options: argparse.Namespace) -> None:
    heads: list[str] = []
    with contextlib.ExitStack() as stack:
        viewers: list[Any] = []
        if options.plotjuggler:
            viewers.append(PlotJuggler(options.plotjuggler, anywhere=options.anywhere))
            stack.callback(viewers[-1].close)
            heads.append(f"PlotJuggler: {viewers[-1].endpoint}")
        if options.foxglove is not None:
            module = importlib.import_module("td3_robot.monitor.foxglove")  # needs an extra
            viewers.append(module.Foxglove(options.foxglove))
            stack.callback(viewers[-1].close)
            heads.append(f"Foxglove: {viewers[-1].address}, layout {viewers[-1].layout}")

        def publish(entry: Entry, message: Message, names: Names) -> None:
            for viewer in viewers:
                viewer.publish(entry, message, names)

        node.listen(MONITOR, ACCEPTS)
        for head in heads:
            print(head, file=sys.stderr if options.json else sys.stdout, flush=True)

        def show(monitor: Monitor) -> bool:
            return _show(monitor.report(time.monotonic()), options.json, heads)

        watch(node, publish if viewers else None, show, every=options.every, seconds=options.seconds)


def watcher_parser(command: str, description: str, epilog: str) -> Parser:
    """Make the parser of a command that acts as a monitor."""
    result = node_parser(command, MONITOR, description, deployable=True, epilog=epilog)
    result.add_argument("--endpoint", metavar="ENDPOINT", help="endpoint to listen at, instead of --run or --config")
    result.add_argument("--keys", metavar="DIR", help="folder of this machine's keys, for --endpoint")
    return result


def watch(
    node: Node,
    listener: Listener | None,
    show: Callable[[Monitor], bool],
    *,
    every: float = 0.0,
    seconds: float | None = None,
) -> None:
    """Receive messages until a signal arrives, the run ends, ``seconds`` have passed, or ``show`` returns False.

    Calls ``show`` at intervals of ``every`` seconds, and once when ``seconds`` have passed.
    """
    logging.getLogger().setLevel(logging.WARNING)
    monitor = Monitor(time.time_ns() - time.monotonic_ns(), listener)
    begun = shown = time.monotonic()

    def after() -> bool:
        nonlocal shown
        now = time.monotonic()
        over = seconds is not None and now - begun >= seconds
        if not over and now - shown < every:
            return False
        shown = now
        return not show(monitor) or over

    def report() -> Figures:
        return Figures(counters=dict(monitor.counters))

    node.spin(monitor, busy=lambda: False, report=report, after=after)


def _show(report: dict[str, Any], as_json: bool, heads: list[str]) -> bool:
    """Print a report. Returns False if the reader has closed the pipe, as ``| head`` does."""
    if as_json:
        text = json.dumps(report)
    else:
        terminal = sys.stdout.isatty()
        lines = table(report)
        if terminal:
            columns, rows = shutil.get_terminal_size()
            lines = [item[: columns - 1] for item in heads + lines][: rows - 1]
        text = (_CLEAR if terminal else "") + "\n".join(lines)
    return say(text)


def table(report: dict[str, Any]) -> list[str]:
    """The lines of a report. Control characters from peers are escaped."""
    width = max([len("topic"), *map(len, report["topics"])]) + 2
    lines = [
        f"{report['elapsed_s']:.1f} s, {report['messages']} messages"
        + (f", {report['unreadable']} NOT READABLE: {report['unreadable_last']}" if report["unreadable"] else ""),
        f"{'topic':<{width}}{'count':>9}{'Hz':>9}{'gaps':>6}{'missing':>9}{'age s':>8}  last",
    ]
    for name, topic in report["topics"].items():
        rate = "-" if topic["rate_hz"] is None else f"{topic['rate_hz']:.1f}"
        last = ", ".join(f"{key} {value}" for key, value in topic["last"].items() if value != "")
        lines.append(
            f"{name:<{width}}{topic['count']:>9}{rate:>9}{topic['gaps']:>6}{topic['missing']:>9}"
            f"{topic['age_s']:>8.1f}  {last}"
        )
    for source, times in report["loop_ms"].items():
        lines.append(f"{source}: loop time {times['median']:.1f} ms (median), longest {times['longest']:.1f} ms")
    for kind in ("processes", "states"):
        if report[kind]:
            lines.append(f"{kind}: {', '.join(f'{node} {state}' for node, state in report[kind].items())}")
    if report["silent_s"]:
        lines.append(f"silent: {', '.join(f'{node} for {age:.1f} s' for node, age in report['silent_s'].items())}")
    lines += [f"fault {line(fault)}" for fault in report["faults"]]
    return [one_line(item, _WIDTH) for item in lines]


if __name__ == "__main__":
    sys.exit(main())
