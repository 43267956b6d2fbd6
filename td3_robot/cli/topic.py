"""``td3-robot topic``: lists topics, shows the fields of their messages, and prints live messages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from td3_robot.errors import EXIT_GOOD, UsageError
from td3_robot.messages import MESSAGES, Message, Turn, wire_fields
from td3_robot.monitor import node as monitor_node
from td3_robot.recording.entries import Entry
from td3_robot.recording.values import Names, whole
from td3_robot.runtime.arguments import Parser, integer
from td3_robot.runtime.node import Node
from td3_robot.runtime.process import run_node
from td3_robot.topics import MONITOR, TOPICS
from td3_robot.transport.tap import RECORDED
from td3_robot.util.output import print_rows, say
from td3_robot.util.text import did_you_mean

WATCHED = sorted(kind.NAME for kind in RECORDED - {Turn})
"""Topics that a monitor can subscribe to; only recorders get Turns."""
_EXAMPLES = """examples:
  td3-robot topic list
  td3-robot topic show step
  td3-robot topic echo step --run runs/walker2d --count 10
  td3-robot topic echo action --config robot.yaml --node policy | jq .message.action

Either echo or the monitor can run, but not both at the same time. For rates and gaps use td3-robot monitor.
"""


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["echo"]:
        return _echo(arguments[1:])
    parser = Parser(
        prog="td3-robot topic", description="List topics, show the fields of their messages.", epilog=_EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="every topic: publisher, subscriber, rate, and what a full queue does")
    showing = commands.add_parser("show", help="the fields of a topic's message")
    showing.add_argument("topic", metavar="TOPIC", help="a topic of the list")
    for command in (listing, showing):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser("echo", help="print live messages as lines of JSON; see echo --help")
    options = parser.parse_args(arguments)
    if options.command == "list":
        print_rows(listed(), as_json=options.json)
    elif options.command == "show":
        kind = _kind(options.topic)
        if not options.json:
            print(" ".join((kind.__doc__ or "").split()))
        print_rows(fields(kind), as_json=options.json)
    else:  # "td3-robot topic -- echo" lacks a topic; the parser of echo prints the error
        return _echo([])
    return EXIT_GOOD


def listed() -> list[dict[str, str]]:
    """Return one row of plain text for each topic."""
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


def _kind(topic: str) -> type[Message]:
    if topic not in MESSAGES:
        raise UsageError(f"there is no topic {topic!r}; {did_you_mean(topic, sorted(MESSAGES), 'allowed:')}")
    return MESSAGES[topic]


def _echo(words: Sequence[str]) -> int:
    parser = monitor_node.watcher_parser("Print each message of a topic as a line of JSON.", _EXAMPLES)
    parser.prog = "td3-robot topic echo"
    parser.add_argument("topic", metavar="TOPIC", help="a topic of td3-robot topic list")
    parser.add_argument("--node", metavar="NAME", help="only messages of this publisher")
    parser.add_argument("--count", type=integer(1), metavar="N", help="end after N messages")
    options = parser.parse_args(words)
    if _kind(options.topic).NAME not in WATCHED:
        raise UsageError(f"topic {options.topic!r} cannot be watched; allowed: {', '.join(WATCHED)}")
    return run_node(MONITOR, options, lambda node: _listen(node, options))


def _listen(node: Node, options: argparse.Namespace) -> None:
    """Print messages until ``--count`` is reached or the reader closes the output."""
    printed = 0
    read = True

    def receive(entry: Entry, message: Message, names: Names) -> None:
        nonlocal printed, read
        wanted = entry.topic == options.topic and options.node in (None, entry.publisher)
        if not wanted or not read or printed == options.count:
            return
        printed += 1
        head = {"publisher": entry.publisher, "number": entry.sequence, "time": entry.published * 1e-9}
        read = say(json.dumps({**head, "message": whole(message, names)}, default=_plain))

    node.serve(MONITOR, monitor_node.ACCEPTS)
    monitor_node.watch(node, receive, lambda _: not read or printed == options.count)


def _plain(value: Any) -> str:
    """Replace bytes by a text with their number, because JSON has no type for bytes."""
    return f"{len(value)} bytes"
