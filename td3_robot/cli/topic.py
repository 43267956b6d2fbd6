"""``td3-robot topic``: lists topics, shows the fields of their messages, and prints live messages and rates."""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import EXIT_GOOD, UsageError
from td3_robot.messages import MESSAGES, Hello, Message, Turn, wire_fields
from td3_robot.monitor import node as monitor_node
from td3_robot.monitor.core import Monitor
from td3_robot.recording.entries import Entry, jumped
from td3_robot.recording.values import Names, whole
from td3_robot.runtime.arguments import Parser, integer, real, suggest
from td3_robot.runtime.node import Node
from td3_robot.runtime.process import run_node
from td3_robot.topics import MONITOR, TOPICS
from td3_robot.transport.tap import RECORDED
from td3_robot.util.output import print_rows, say
from td3_robot.util.text import did_you_mean, printable

log = logging.getLogger(__name__)

_QUIET = 5.0
"""``topic echo`` logs a warning if it has printed no message after this many seconds."""
WATCHED = sorted(kind.NAME for kind in RECORDED - {Turn})
"""Topics that a monitor can subscribe to: all recorded topics except Turn, which only recorders get."""
_ROLES = {"source": ROBOT_ROLES, "policy server": ("policy",)}
"""The roles of the subscribers ``source`` and ``policy server`` in the table of topics.

For every other subscriber, :func:`subscribers` uses the subscriber's name as the role.
"""
_EXAMPLES = """examples:
  td3-robot topic list
  td3-robot topic show step
  td3-robot topic echo step --run runs/walker2d --count 10
  td3-robot topic echo action --config robot.yaml --node policy | jq .message.action

  td3-robot topic hz step --run runs/walker2d
  td3-robot topic info action --config robot.yaml

echo, hz and info attach to running nodes. Up to 32 programs can watch one run or one robot at the same time: these
commands, monitors and dashboards.
"""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "list":
        print_rows(listed(), as_json=options.json)
        return EXIT_GOOD
    if options.topic not in MESSAGES:
        hint = did_you_mean(options.topic, sorted(MESSAGES), "allowed:")
        raise UsageError(f"there is no topic {options.topic!r}; {hint}")
    if options.command == "show":
        kind = MESSAGES[options.topic]
        if not options.json:
            print(" ".join((kind.__doc__ or "").split()))
        print_rows(fields(kind), as_json=options.json)
        return EXIT_GOOD
    if options.topic not in WATCHED:
        raise UsageError(f"topic {options.topic!r} cannot be watched; allowed: {', '.join(WATCHED)}")
    body = {"echo": _echo, "hz": _measure, "info": _describe}[options.command]

    def watch(node: Node) -> None:
        node.listen(MONITOR, monitor_node.ACCEPTS)
        body(node, options)

    return run_node(MONITOR, options, watch)


def _parser() -> Parser:
    parser = Parser(
        prog="td3-robot topic", description="List topics, show their fields, and print messages live.", epilog=_EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="every topic: publisher, subscriber, rate, and what a full queue does")
    showing = commands.add_parser("show", help="the fields of a topic's message")
    showing.add_argument("topic", metavar="TOPIC", help="a topic, see td3-robot topic list")
    for command in (listing, showing):
        command.add_argument("--json", action="store_true", help="print one JSON object")

    def live(name: str, purpose: str, description: str) -> argparse.ArgumentParser:
        """Add a command that attaches to running nodes."""
        shared = monitor_node.watcher_parser("td3-robot topic", "", "")
        command = commands.add_parser(
            name, parents=[shared], add_help=False, help=purpose, description=description, epilog=_EXAMPLES
        )
        command.set_defaults(prog=command.prog)
        topic = command.add_argument("topic", metavar="TOPIC", help="a topic, see td3-robot topic list")
        suggest(topic, lambda: WATCHED)
        command.add_argument("--node", metavar="NAME", help="only messages of this publisher")
        return command

    seconds = real(above=True, unit="s")
    echo = live("echo", "print live messages as lines of JSON", "Print each message of a topic as a line of JSON.")
    echo.add_argument("--count", type=integer(1), metavar="N", help="end after N messages")
    hz = live(
        "hz",
        "print the rate and the jitter of a live topic",
        "Print the rate of a topic. The times come from the publisher's clock.",
    )
    hz.add_argument(
        "--window", type=integer(2), default=1000, metavar="N", help="measure the newest N messages (default: 1000)"
    )
    hz.add_argument("--every", type=seconds, default=1.0, metavar="S", help="seconds between lines (default: 1)")
    hz.add_argument("--seconds", type=seconds, metavar="S", help="end after S seconds")
    hz.add_argument("--json", action="store_true", help="print each line as JSON")
    info = live(
        "info",
        "type, publishers and subscribers of a live topic",
        "Print type, publishers and subscribers of a topic.",
    )
    info.add_argument(
        "--seconds", type=seconds, default=3.0, metavar="S", help="seconds to wait for messages (default: 3)"
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def listed() -> list[dict[str, str]]:
    """Return one row of plain text for each row of the table of topics. A topic may have several rows."""
    return [
        {
            "topic": topic.message.NAME,
            "from": topic.publisher,
            "to": topic.subscriber,
            "link": topic.link,
            "rate": topic.rate,
            "queue": topic.queue,
            "recorded": topic.recorded,
        }
        for topic in TOPICS
    ]


def fields(kind: type[Message]) -> list[dict[str, str]]:
    """Return one row of plain text for each field of a message."""
    return [
        {"field": name, "type": wire.type_name, "unit": wire.unit, "meaning": wire.meaning}
        for name, wire in wire_fields(kind).items()
    ]


def _measure(node: Node, options: argparse.Namespace) -> None:
    """Print the rate of each publisher every ``--every`` seconds."""
    times: dict[str, deque[int]] = {}
    newest: dict[str, Entry] = {}
    heard: dict[str, float] = {}  # when the newest message arrived

    def receive(entry: Entry, message: Message, names: Names) -> None:
        del message, names
        if entry.topic == options.topic and options.node in (None, entry.publisher):
            heard[entry.publisher] = time.monotonic()
            stamps = times.setdefault(entry.publisher, deque(maxlen=options.window))
            last = newest.get(entry.publisher, entry)
            if jumped(entry.published - last.published, entry.received - last.received):
                stamps.clear()  # a clock was set, or this program stood still
            stamps.append(entry.published)
            newest[entry.publisher] = entry

    def show(monitor: Monitor) -> bool:
        del monitor
        now = time.monotonic()
        rows = [
            {"publisher": name, **figures, "age_s": round(now - heard[name], 3)}
            for name, stamps in sorted(times.items())
            if (figures := rate(stamps))
        ]
        lines = [json.dumps(row) if options.json else rate_line(row, options.every) for row in rows]
        return all(say(line) for line in lines or ([] if options.json else ["no rate yet"]))

    monitor_node.watch(node, receive, show, every=options.every, seconds=options.seconds)


def rate(stamps: Sequence[int]) -> dict[str, float]:
    """The rate (Hz) of the times ``stamps`` (ns), and facts about the periods (ms) between them.

    The result is empty if ``stamps`` has fewer than two elements, or if the last time is not after the first time.
    """
    periods = [(later - earlier) * 1e-6 for earlier, later in pairwise(stamps)]
    if not periods or sum(periods) <= 0:
        return {}
    figures = {
        "rate_hz": 1e3 / statistics.fmean(periods),
        "min_ms": min(periods),
        "max_ms": max(periods),
        "std_dev_ms": statistics.pstdev(periods),
    }
    return {**{name: round(value, 3) for name, value in figures.items()}, "window": len(stamps)}


def rate_line(row: Mapping[str, Any], every: float) -> str:
    """Return a row of :func:`rate` as a line for people.

    If the publisher has sent nothing for ``every`` seconds, the line also says for how long.
    """
    periods = f"min {row['min_ms']:.3f} ms, max {row['max_ms']:.3f} ms, std dev {row['std_dev_ms']:.3f} ms"
    silent = f"; NO message for {row['age_s']:.1f} s" if row["age_s"] > every else ""
    return f"{printable(row['publisher'])}: {row['rate_hz']:.2f} Hz, {periods}, window {row['window']}{silent}"


def _describe(node: Node, options: argparse.Namespace) -> None:
    """Watch the nodes for ``--seconds`` seconds. Then print what is known about the topic."""
    publishers: Counter[str] = Counter()
    clients: dict[tuple[str, str], str] = {}  # maps link and name of a node to its role

    def receive(entry: Entry, message: Message, names: Names) -> None:
        del names
        if isinstance(message, Hello):
            clients[entry.link, message.name] = message.role
        if entry.topic == options.topic and options.node in (None, entry.publisher):
            publishers[entry.publisher] += 1

    monitor_node.watch(node, receive, lambda _: True, seconds=options.seconds)
    facts = {
        "topic": options.topic,
        "type": MESSAGES[options.topic].__name__,
        "rows": [row for row in listed() if row["topic"] == options.topic],
        "publishers": dict(sorted(publishers.items())),
        "subscribers": subscribers(options.topic, clients),
    }
    say(json.dumps(facts) if options.json else info_text(facts))


def subscribers(topic: str, clients: Mapping[tuple[str, str], str]) -> list[str]:
    """The subscribers of a topic.

    In the table of topics, each row of this topic has a link and a subscriber. For each row, the result contains the
    names of the clients that are known on this link and have a role of this subscriber. If no such client is known, the
    result contains the subscriber itself. ``clients`` maps link and name of a known client to its role.
    """
    found: set[str] = set()
    for row in (row for row in listed() if row["topic"] == topic):
        wanted = _ROLES.get(row["to"], (row["to"],))
        names = {name for (link, name), role in clients.items() if link == row["link"] and role in wanted}
        found |= names or {row["to"]}
    return sorted(found)


def info_text(facts: Mapping[str, Any]) -> str:
    """The facts of ``topic info`` as text for people."""
    seen = ", ".join(f"{printable(name)} ({count} messages)" for name, count in facts["publishers"].items())
    known = ", ".join(printable(name) for name in facts["subscribers"])
    rows = [f"  {row['from']} to {row['to']}: {row['rate']}; {row['queue']}" for row in facts["rows"]]
    lines = [f"type: {facts['type']}", *rows, f"publishers: {seen or 'no message yet'}", f"subscribers: {known}"]
    return "\n".join(lines)


def _echo(node: Node, options: argparse.Namespace) -> None:
    """Print messages until ``--count`` is reached or the reader closes the output."""
    printed = 0
    read = True
    publishers: set[str] = set()  # of the topic
    warn_at = time.monotonic() + _QUIET

    def receive(entry: Entry, message: Message, names: Names) -> None:
        nonlocal printed, read
        if entry.topic != options.topic:
            return
        publishers.add(entry.publisher)
        if options.node not in (None, entry.publisher) or not read or printed == options.count:
            return
        printed += 1
        head = {"publisher": entry.publisher, "number": entry.sequence, "time": entry.published * 1e-9}
        read = say(json.dumps({**head, "message": whole(message, names)}, default=_plain))

    def show(monitor: Monitor) -> bool:
        nonlocal warn_at
        del monitor
        if not printed and time.monotonic() >= warn_at:
            warn_at = math.inf
            log.warning("%s", quiet_line(options.topic, options.node, publishers))
        return read and printed != options.count

    monitor_node.watch(node, receive, show)


def quiet_line(topic: str, wanted: str | None, publishers: Collection[str]) -> str:
    """The warning that ``topic echo`` has printed nothing so far. ``publishers``: those that it has heard."""
    of_node = "" if wanted is None else f" of {wanted!r}"
    heard = f"; publishers so far: {', '.join(map(printable, sorted(publishers)))}" if publishers else ""
    return f"no message{of_node} with topic {topic!r} in {_QUIET:g} s{heard}"


def _plain(value: Any) -> str:
    """Return the number of bytes as text, because JSON has no type for bytes."""
    return f"{len(value)} bytes"
