"""``td3-robot info``: shows the content of a recording, and its damage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, SessionError, UsageError
from td3_robot.messages import Action, ActionOrigin, Hello, Message, Phase, Step, Weights
from td3_robot.recording.decoder import Decoder
from td3_robot.recording.entries import METADATA, REASON, Attachment, Entry
from td3_robot.recording.faults import Faults, line
from td3_robot.recording.session_file import SessionFile, other_protocol
from td3_robot.recording.stream import Stream
from td3_robot.recording.timeline import Timeline, event_line
from td3_robot.runtime.arguments import Parser
from td3_robot.util.text import printable

_EXAMPLES = """examples:
  td3-robot info runs/walker2d/session.mcap
  td3-robot info runs/walker2d/session.mcap --check
  td3-robot info walk.mcap --json | jq .topics
  td3-robot info walk.mcap --timeline

With --check the exit code is 1 if the file is damaged, or a message does not follow this version of the protocol.
"""


class Contents:
    """The metadata and attachments of a file, and statistics of its messages.

    Without a decoder, this class counts the messages and does not decode them. The timeline gets every entry. With a
    decoder, the timeline also gets each decoded message.
    """

    def __init__(self, file: SessionFile, decode: Decoder | None = None, timeline: Timeline | None = None) -> None:
        self.metadata: dict[str, str] = {}
        self.attachments: list[Attachment] = []
        self.streams: dict[tuple[str, int, str], Stream] = {}
        self.robot_roles: set[str] = set()
        self.problems: list[str] = []
        self._counts: Counter[str] = Counter()
        self._weights: set[int] = set()
        self._left_out: set[int] = set()
        self._acting: set[int] = set()
        self._faults = Faults()
        self._timeline = timeline
        for item in file.items():
            if isinstance(item, Attachment):
                self.attachments.append(item)
            elif isinstance(item, Entry):
                self._add(item, decode)
            elif item.name == METADATA:
                self.metadata = item.metadata
                if decode and (other := other_protocol(item.metadata)):
                    self.problems.append(f"the messages of the file were not checked: {other}")
                    decode = None

    @property
    def messages(self) -> int:
        return sum(stream.count for stream in self.streams.values())

    def _add(self, entry: Entry, decode: Decoder | None) -> None:
        if entry.stream not in self.streams:
            self.streams[entry.stream] = Stream(entry)
        missing = self.streams[entry.stream].add(entry)
        if self._timeline:
            self._timeline.add_entry(entry, missing)
        if decode:
            try:
                decode.learn(entry)
                self._add_decoded(entry, decode(entry))
            except SessionError as error:
                self.problems.append(str(error))

    def _add_decoded(self, entry: Entry, message: Message) -> None:
        fault = self._faults.add(entry, message)
        if self._timeline:
            self._timeline.add(entry, message, fault)
        if isinstance(message, Step):
            for phase in Phase:
                self._counts[phase.name.lower()] += int(np.count_nonzero(message.phase == phase))
            self._counts["fallbacks"] += message.origin in (ActionOrigin.HELD, ActionOrigin.ZERO)
            self._counts["operator"] += any(message.operated.values())
        elif isinstance(message, Hello) and message.role in ROBOT_ROLES:
            self.robot_roles.add(message.role)
        elif isinstance(message, Weights):
            (self._weights if message.payload else self._left_out).add(message.version)
        elif isinstance(message, Action):
            self._acting.add(message.weights_version)

    def report(self) -> dict[str, Any]:
        begin = min((stream.first for stream in self.streams.values()), default=0)
        end = max((stream.last for stream in self.streams.values()), default=0)
        return {
            "begin": datetime.fromtimestamp(begin * 1e-9, timezone.utc).isoformat(timespec="milliseconds"),
            "duration_s": round((end - begin) * 1e-9, 3),
            "messages": self.messages,
            "topics": {
                f"{publisher}/{topic}" + (f" ({incarnation})" if incarnation else ""): stream.report()
                for (publisher, incarnation, topic), stream in sorted(self.streams.items())
            },
            "robot_steps": {phase.name.lower(): self._counts[phase.name.lower()] for phase in Phase},
            "policy_versions": {
                "recorded": _ends(self._weights),
                "count": len(self._weights),
                "left_out": len(self._left_out - self._weights),
                "acting": _ends(self._acting),
            },
            "fallback_steps": self._counts["fallbacks"],
            "operator_steps": self._counts["operator"],
            "faults": self._faults.report(begin),
        }


def _ends(versions: set[int]) -> list[int]:
    return [min(versions), max(versions)] if versions else []


def examine(path: Path, timeline: Timeline | None = None) -> dict[str, Any]:
    """The report on a file, as plain JSON values. If ``timeline`` is given, the timeline's report is added.

    Raises:
        SessionError: the file cannot be read, or is not a recording.
        UsageError: the file has no Step of the robot that the timeline asks for.
    """
    file = SessionFile(path)
    contents = Contents(file, Decoder(repr(str(path))), timeline)
    report = contents.report()
    metadata, problems = contents.metadata, contents.problems
    # A deployed robot has no task. Older recorders wrote the configuration's default task, which is wrong.
    if contents.robot_roles == {"driver"}:
        metadata.pop("task", None)
    damages = file.all_damages
    if unfinished := file.being_written():
        # An incomplete end is no damage, because a recorder is still writing this file.
        damages = [damage for damage in damages if damage.offset < file.read]
    try:
        host = json.loads(metadata.pop("host", "null"))
    except ValueError:
        host = None
        problems.append("the description of the recording machine is not JSON")
    return {
        "file": str(path),
        "bytes": file.size,
        "being_written": unfinished,
        **report,
        "metadata": metadata,
        "host": host,
        "attachments": [{"name": item.name, "bytes": len(item.data)} for item in contents.attachments],
        "damages": [f"byte {damage.offset}: {damage.why}" for damage in damages] + problems,
        **(timeline.report() if timeline else {}),
    }


def main(arguments: Sequence[str]) -> int:
    about = "Show the content of a recording: topics, rates, gaps, policy versions, faults."
    parser = Parser(prog="td3-robot info", description=about, epilog=_EXAMPLES)
    parser.add_argument("file", type=Path, metavar="FILE", help="a session.mcap")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is damaged")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--timeline", action="store_true", help="also show events and gaps, with their times")
    words = "with --timeline --json: show channels of this robot (default: the first)"
    parser.add_argument("--robot", metavar="SOURCE/N", help=words)
    options = parser.parse_args(arguments)
    if options.robot and not (options.timeline and options.json):
        raise UsageError("--robot needs --timeline and --json")
    report = examine(options.file, Timeline(options.robot) if options.timeline else None)
    print(json.dumps(report, indent=2) if options.json else text(report))
    return EXIT_CHECK_FAILED if options.check and report["damages"] else EXIT_GOOD


def text(report: dict[str, Any]) -> str:
    about, versions, robot = report["metadata"], report["policy_versions"], report["robot_steps"]
    lines = [
        f"{report['file']}: {report['bytes'] / 1e6:.2f} MB, {report['messages']} messages in {report['duration_s']} s",
        f"recorded {report['begin']} {by(about)}",
        *([f"written because of {printable(about[REASON])}"] if REASON in about else []),
        *(["a recorder is writing this file; its last messages are not shown yet"] if report["being_written"] else []),
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
        f"policy versions: {versions['count']} recorded{_range(versions['recorded'])}, "
        + (f"{versions['left_out']} left out, " if versions["left_out"] else "")
        + f"used for Actions{_range(versions['acting'])}",
        f"steps without an action in time: {report['fallback_steps']}",
        *([f"steps under an operator: {report['operator_steps']}"] if report["operator_steps"] else []),
        f"attachments: {', '.join(item['name'] for item in report['attachments']) or 'none'}",
        *(f"fault: {line(fault)}" for fault in report["faults"]),
        *(event_line(event) for event in report.get("events", ())),
        *(f"DAMAGED: {damage}" for damage in report["damages"]),
    ]
    return "\n".join(map(printable, lines))


def by(metadata: Mapping[str, str]) -> str:
    """The version, the protocol and, if known, the task of a recording, as text."""
    version, protocol = (metadata.get(key, "?") for key in ("td3-robot", "protocol"))
    task = f", task {metadata['task']}" if "task" in metadata else ""
    return f"by td3-robot {version}, protocol {protocol}{task}"


def _range(ends: list[int]) -> str:
    return f" ({ends[0]} to {ends[1]})" if ends else " (none)"
