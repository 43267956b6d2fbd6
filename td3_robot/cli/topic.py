"""``td3-robot topic``: which topics there are, what their messages hold, and what is said on one of them now."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from td3_robot import node as nodes
from td3_robot.errors import EXIT_GOOD, UsageError
from td3_robot.messages import MESSAGES, Message, Record, Turn, wire_fields
from td3_robot.node import Figures, Node, Parser
from td3_robot.session.entries import Entry
from td3_robot.session.monitor import Monitor
from td3_robot.session.values import Names
from td3_robot.topics import MONITOR, TOPICS
from td3_robot.transport.tap import RECORDED

WATCHED = sorted(kind.NAME for kind in RECORDED - {Turn})
"""What is offered to those who watch; Turns are for recorders."""
_EXAMPLES = """examples:
  td3-robot topic list
  td3-robot topic show step
  td3-robot topic echo step --run runs/walker2d --count 10
  td3-robot topic echo action --config robot.yaml --node policy | jq .message.action

echo takes the place of a monitor, of which there is one at a time: rates and gaps are what td3-robot monitor shows.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["echo"]:
        return _echo(words[1:])
    parser = Parser(
        prog="td3-robot topic", description="Which topics there are, what their messages hold.", epilog=_EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="every topic: who says it to whom, how often, what a full queue does")
    showing = commands.add_parser("show", help="the fields of a topic's message")
    showing.add_argument("topic", metavar="TOPIC", help="one of those of list")
    for command in (listing, showing):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser("echo", help="each message of a topic as a line of JSON, live; see echo --help")
    options = parser.parse_args(words)
    if options.command == "list":
        _print(listed(), as_json=options.json)
    elif options.command == "show":
        kind = _kind(options.topic)
        if not options.json:
            print(" ".join((kind.__doc__ or "").split()))
        _print(fields(kind), as_json=options.json)
    else:  # behind a "--"
        return _echo([])
    return EXIT_GOOD


def listed() -> list[dict[str, str]]:
    """The topics, as plain text values."""
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
    """The fields of a message, as plain text values."""
    return [
        {"field": name, "type": wire.type_name, "unit": wire.unit, "meaning": wire.meaning}
        for name, wire in wire_fields(kind).items()
    ]


def _kind(topic: str) -> type[Message]:
    if topic not in MESSAGES:
        near = difflib.get_close_matches(topic, MESSAGES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(MESSAGES))}"
        raise UsageError(f"there is no topic {topic!r}; {hint}")
    return MESSAGES[topic]


def _print(table: list[dict[str, str]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": table}))
        return
    widths = {key: max(len(key), *(len(row[key]) for row in table)) for key in table[0]}
    for row in ({key: key.upper() for key in widths}, *table):
        print("  ".join(f"{row[key]:<{width}}" for key, width in widths.items()).rstrip())


def _echo(words: Sequence[str]) -> int:
    parser = nodes.parser(
        MONITOR, MONITOR, "Print each message of a topic as a line of JSON.", deployable=True, epilog=_EXAMPLES
    )
    parser.prog = "td3-robot topic echo"
    parser.add_argument("topic", metavar="TOPIC", help="one of those of td3-robot topic list")
    parser.add_argument("--node", metavar="NAME", help="only what this one says")
    parser.add_argument("--count", type=int, metavar="N", help="end after so many messages")
    parser.add_argument("--endpoint", metavar="ENDPOINT", help="where nodes shall find this, without run or FILE")
    parser.add_argument("--keys", metavar="DIR", help="with --endpoint: folder of this machine's keys")
    options = parser.parse_args(words)
    if _kind(options.topic).NAME not in WATCHED:
        raise UsageError(f"topic {options.topic!r} is offered to nobody who watches; allowed: {', '.join(WATCHED)}")
    if options.count is not None and options.count < 1:
        raise UsageError(f"--count is {options.count}; allowed: 1 and more")
    return nodes.main(MONITOR, options, lambda node: _listen(node, options))


def _listen(node: Node, options: argparse.Namespace) -> None:
    logging.getLogger().setLevel(logging.WARNING)
    said = 0
    read = True

    def say(entry: Entry, message: Message, names: Names) -> None:
        nonlocal said, read
        wanted = entry.topic == options.topic and options.node in (None, entry.publisher)
        if not wanted or not read or said == options.count:
            return
        said += 1
        head = {"publisher": entry.publisher, "number": entry.sequence, "time": entry.published * 1e-9}
        try:
            print(json.dumps({**head, "message": spoken(message, names)}, default=_plain), flush=True)
        except BrokenPipeError:  # head has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            read = False

    monitor = Monitor(time.time_ns() - time.monotonic_ns(), say)
    node.serve(MONITOR, {"node": (Record,)})
    node.spin(
        monitor,
        busy=lambda: False,
        report=lambda: Figures(counters=dict(monitor.counters)),
        after=lambda: not read or said == options.count,
    )


def spoken(message: Message, names: Names) -> dict[str, Any]:
    """The fields of a message as plain values, channels of observations and actions by their names where known."""
    said: dict[str, Any] = {}
    for name, wire in wire_fields(type(message)).items():
        value = getattr(message, name)
        if wire.kind == "array":
            labels = names.get(wire.shape[-1], ())
            value = _labelled(value.tolist(), labels) if len(labels) == value.shape[-1] else value.tolist()
        said[name] = value
    return said


def _labelled(values: list[Any], labels: Sequence[str]) -> Any:
    if values and isinstance(values[0], list):
        return [_labelled(row, labels) for row in values]
    return dict(zip(labels, values, strict=True))


def _plain(value: Any) -> str:
    """What JSON has not: bytes, of which only the number is of interest."""
    return f"{len(value)} bytes"
