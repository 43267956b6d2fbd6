"""Exports a recording as a second MCAP file with ROS 2 messages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from mcap.writer import Writer

from td3_robot.errors import SessionError
from td3_robot.messages import Hello
from td3_robot.recording.reader import Session
from td3_robot.recording.ros2_messages import CONVERTED, Converter, definition


def export(session: Session, path: Path) -> tuple[Counter[str], list[str]]:
    """Write the file.

    Returns:
        The number of messages of each topic, and remarks about data that no ROS message can hold.

    Raises:
        SessionError: the recording is damaged, or has no message to convert.
        OSError: the file exists or cannot be written.
    """
    topics = {message.NAME for message in CONVERTED}
    recorded = {topic for _, _, topic in session.counts}
    sources = topics - {Hello.NAME}
    if not recorded & sources:
        allowed = ", ".join(sorted(sources))
        raise SessionError(f"{str(session.paths[0])!r} holds no message to convert; needed is one of {allowed}")
    converter = Converter()
    for _, hello in reversed(list(session.robots())):  # the first Hello may come after the first Step
        converter.learn(hello)
    counts: Counter[str] = Counter()
    with path.open("xb") as file:
        writer = Writer(file)
        writer.start("ros2")
        schemas: dict[str, int] = {}
        channels: dict[str, int] = {}
        for entry in session.timed(topics):
            for draft in converter.convert(session.decode(entry), entry.published):
                if draft.type not in schemas:
                    schemas[draft.type] = writer.register_schema(draft.type, "ros2msg", definition(draft.type))
                if draft.topic not in channels:
                    channels[draft.topic] = writer.register_channel(draft.topic, "cdr", schemas[draft.type])
                writer.add_message(
                    channels[draft.topic], entry.received, draft.cdr(), entry.published, counts[draft.topic]
                )
                counts[draft.topic] += 1
        writer.finish()
    remarks = converter.remarks()
    if rest := sorted(recorded - topics):
        remarks.append(f"not converted: {', '.join(rest)}")
    return counts, remarks


def summary(counts: Counter[str]) -> list[str]:
    """Return the lines of the report. The channels of a robot share a line."""
    lines: dict[str, list[int]] = {}
    for topic, count in counts.items():
        channel = re.fullmatch(r"(/.+/robot_\d+/(?:observation|action)/).+", topic)
        lines.setdefault(f"{channel[1]}*" if channel else topic, []).append(count)
    return [
        f"{topic}: {sum(found)} messages" + (f", channels: {len(found)}" if topic.endswith("*") else "")
        for topic, found in lines.items()
    ]
