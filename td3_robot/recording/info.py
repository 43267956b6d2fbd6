"""``td3-robot info``: shows the content of a recording, and any damage."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, SessionError
from td3_robot.messages import Action, ActionOrigin, Message, Phase, Step, Weights
from td3_robot.recording.decoder import Decoder
from td3_robot.recording.entries import METADATA, REASON, Attachment, Entry, printable
from td3_robot.recording.faults import Faults, line
from td3_robot.recording.reader import Damage, Metadata, SessionFile, other_protocol
from td3_robot.recording.stream import Stream
from td3_robot.runtime.arguments import Parser

_EXAMPLES = """examples:
  td3-robot info runs/walker2d/session.mcap
  td3-robot info runs/walker2d/session.mcap --check
  td3-robot info walk.mcap --json | jq .topics

With --check the exit code is 1 if the file is damaged, or a message in it is not one of the protocol.
"""


@dataclass
class Contents:
    """Collects the statistics that ``info`` shows."""

    streams: dict[tuple[str, int, str], Stream] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    shipped: list[int] = field(default_factory=list)
    acted: set[int] = field(default_factory=set)
    faults: Faults = field(default_factory=Faults)
    seen: set[tuple[str, int, str, int]] = field(default_factory=set)

    def add(self, entry: Entry) -> bool:
        """Count an entry. Returns False, and counts nothing, if the entry is a copy of an earlier one."""
        if entry.identity in self.seen:
            return False
        self.seen.add(entry.identity)
        stream = self.streams.get(entry.stream)
        if stream is None:
            stream = self.streams[entry.stream] = Stream.beginning(entry)
        stream.add(entry)
        return True

    def look(self, entry: Entry, message: Message) -> None:
        """Count phases, weights versions and faults of a message."""
        self.faults.look(entry, message)
        if isinstance(message, Step):
            for phase in Phase:
                self.counts[phase.name.lower()] += int(np.count_nonzero(message.phase == phase))
            self.counts["fallbacks"] += message.origin in (ActionOrigin.HELD, ActionOrigin.ZERO)
        elif isinstance(message, Weights):
            self.shipped.append(message.version)
        elif isinstance(message, Action):
            self.acted.add(message.weights_version)

    def report(self) -> dict[str, Any]:
        streams = self.streams.values()
        begin, end = min((s.first for s in streams), default=0), max((s.last for s in streams), default=0)
        return {
            "begin": datetime.fromtimestamp(begin * 1e-9, timezone.utc).isoformat(timespec="milliseconds"),
            "duration_s": round((end - begin) * 1e-9, 3),
            "messages": sum(s.count for s in streams),
            "topics": {
                f"{publisher}/{topic}" + (f" ({incarnation})" if incarnation else ""): stream.report()
                for (publisher, incarnation, topic), stream in sorted(self.streams.items())
            },
            "robot_steps": {phase.name.lower(): self.counts[phase.name.lower()] for phase in Phase},
            "policy_versions": {
                "recorded": [min(self.shipped), max(self.shipped)] if self.shipped else [],
                "count": len(set(self.shipped)),
                "acting": [min(self.acted), max(self.acted)] if self.acted else [],
            },
            "fallback_steps": self.counts["fallbacks"],
            "faults": self.faults.report(begin),
        }


def examine(path: Path) -> dict[str, Any]:
    """The report on a file, as plain JSON values. ``damages`` lists all damage.

    Raises:
        SessionError: the file cannot be read, or is not a recording.
    """
    file, contents = SessionFile(path), Contents()
    attachments: list[dict[str, Any]] = []
    metadata: dict[str, str] = {}
    decode = decoder_of(path)
    problems: list[str] = []
    foreign: str | None = None
    for item in file.items():
        if isinstance(item, Metadata) and item.name == METADATA:
            metadata = item.values
            if foreign := other_protocol(metadata):
                problems.append(f"its messages, which were not looked at: {foreign}")
        elif isinstance(item, Attachment):
            attachments.append({"name": item.name, "bytes": len(item.data)})
        elif isinstance(item, Entry) and contents.add(item) and not foreign:
            try:
                contents.look(item, decode(item))
            except SessionError as error:
                problems.append(str(error))
    report = contents.report()
    try:
        host = json.loads(metadata.pop("host", "null"))
    except ValueError:
        host = None
        problems.append("what the recording says about its machine is not JSON")
    return {
        "file": str(path),
        "bytes": file.size,
        **report,
        "metadata": metadata,
        "host": host,
        "attachments": attachments,
        "damages": [_line(damage) for damage in file.all_damages] + problems,
    }


def decoder_of(path: Path) -> Decoder:
    """A decoder that knows the sizes of every source in the file.

    Raises:
        SessionError: the file cannot be read, or is not a recording.
    """
    decoder = Decoder(repr(str(path)))
    for item in SessionFile(path).items():
        if isinstance(item, Entry):
            with contextlib.suppress(SessionError):  # the caller decodes the message again, and reports the error
                decoder.learn(item)
    return decoder


def _line(damage: Damage) -> str:
    return f"byte {damage.offset}: {damage.why}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot info",
        description="Show the content of a recording: topics, rates, gaps, policy versions, faults.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a session.mcap")
    parser.add_argument("--check", action="store_true", help="exit 1 if anything in the file is damaged")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    report = examine(options.file)
    print(json.dumps(report, indent=2) if options.json else text(report))
    return EXIT_CHECK_FAILED if options.check and report["damages"] else EXIT_GOOD


def text(report: dict[str, Any]) -> str:
    """The report for a person."""
    about, versions, robot = report["metadata"], report["policy_versions"], report["robot_steps"]
    lines = [
        f"{report['file']}: {report['bytes'] / 1e6:.2f} MB, {report['messages']} messages in {report['duration_s']} s",
        f"recorded {report['begin']} {by(about)}",
        *([f"written because of {about[REASON]}"] if REASON in about else []),
        "",
        f"{'topic':<28}{'count':>8}{'Hz':>10}{'MB':>9}{'begins':>8}{'gaps':>6}{'missing':>9}{'longest s':>11}",
    ]
    for name, stream in report["topics"].items():
        rate = f"{stream['rate_hz']:.1f}" if stream["rate_hz"] else "-"
        lines.append(
            f"{name:<28}{stream['count']:>8}{rate:>10}{stream['bytes'] / 1e6:>9.2f}{stream['begins_at']:>8}"
            f"{stream['gaps']:>6}{stream['missing']:>9}{stream['longest_s']:>11.3f}"
        )
    lines += [
        "",
        "robot steps: " + ", ".join(f"{count} {phase}" for phase, count in robot.items()),
        f"policy: {versions['count']} versions recorded{_range(versions['recorded'])}, "
        f"acting{_range(versions['acting'])}",
        f"steps without an action in time: {report['fallback_steps']}",
        f"attachments: {', '.join(item['name'] for item in report['attachments']) or 'none'}",
        *(f"fault: {line(fault)}" for fault in report["faults"]),
        *(f"DAMAGED at {damage}" for damage in report["damages"]),
    ]
    return printable("\n".join(lines))


def by(metadata: Mapping[str, str]) -> str:
    """The version, protocol and task of a recording, in words."""
    said = {key: metadata.get(key, "?") for key in ("td3-robot", "protocol", "task")}
    return f"by td3-robot {said['td3-robot']}, protocol {said['protocol']}, task {said['task']}"


def _range(ends: list[int]) -> str:
    return f" ({ends[0]} to {ends[1]})" if ends else " (none)"


if __name__ == "__main__":
    sys.exit(main())
