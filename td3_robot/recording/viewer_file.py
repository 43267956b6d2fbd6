"""Exports a recording as a second MCAP file for viewers, with ROS 2 messages or Foxglove messages."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from mcap.writer import Writer

from td3_robot.errors import SessionError
from td3_robot.messages import Hello, Message
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.util import files


class Schema(NamedTuple):
    """A message type in an MCAP file: its name, and its definition in ``ros2msg``, ``protobuf`` or ``jsonschema``.

    ``message_encoding`` is the encoding of its messages: ``cdr``, ``protobuf`` or ``json``.
    """

    name: str
    encoding: str
    definition: bytes
    message_encoding: str


class Draft(Protocol):
    """A message for viewers that is not serialized yet."""

    @property
    def topic(self) -> str: ...
    def schema(self) -> Schema: ...
    def data(self) -> bytes: ...


class Converter(ABC):
    """Converts messages of a recording, or live messages, in their order.

    Attributes:
        profile: the MCAP profile of the file.
        converted: types of the messages to convert.
    """

    profile: ClassVar[str] = ""
    converted: ClassVar[Sequence[type[Message]]]

    @abstractmethod
    def learn(self, hello: Hello) -> None:
        """Take the names of a source's channels from its Hello."""

    @abstractmethod
    def convert(self, entry: Entry, message: Message) -> Iterator[Draft]:
        """Yield the viewer's messages for a recorded message. Yield nothing if its type is not in ``converted``."""

    def layout(self) -> bytes | None:
        """Return a layout file: the viewer's panels for the converted messages. None if the viewer has no such file."""
        return None

    def remarks(self) -> list[str]:
        """Return lines about channels without names, and about channels that are in no joint message."""
        return []


def export(session: Session, path: Path, converter: Converter) -> tuple[Counter[str], list[str]]:
    """Write the file. Returns the number of messages of each written topic, and remarks for the user.

    The remarks are those of the converter, and a list of the recorded topics that are not converted. If an error
    occurs, an existing file does not change.

    Raises:
        SessionError: the recording is damaged, or has no message to convert.
        OSError: the file cannot be written.
    """
    topics = {message.NAME for message in converter.converted}
    recorded = {topic for _, _, topic in session.counts}
    sources = topics - {Hello.NAME}
    if not recorded & sources:
        allowed = ", ".join(sorted(sources))
        raise SessionError(f"{str(session.paths[0])!r} holds no message to convert; it must hold one of {allowed}")
    # The first Step may come before the first Hello, so learn the Hellos now. The converter keeps only the last Hello
    # that it learns for a source. So go backwards, to keep the first Hello of each source.
    for _, hello in reversed(list(session.robots())):
        converter.learn(hello)
    counts: Counter[str] = Counter()
    with files.replacing(path) as unfinished, unfinished.open("wb") as file:
        writer = Writer(file)
        writer.start(converter.profile)
        schemas: dict[Schema, int] = {}
        channels: dict[str, int] = {}
        for entry in session.timed(topics):
            for draft in converter.convert(entry, session.decode(entry)):
                if draft.topic not in channels:
                    schema = draft.schema()
                    if schema not in schemas:
                        schemas[schema] = writer.register_schema(schema.name, schema.encoding, schema.definition)
                    channels[draft.topic] = writer.register_channel(
                        draft.topic, schema.message_encoding, schemas[schema]
                    )
                channel, sequence = channels[draft.topic], counts[draft.topic]
                writer.add_message(channel, entry.received, draft.data(), entry.published, sequence)
                counts[draft.topic] += 1
        writer.finish()
    remarks = converter.remarks()
    if rest := sorted(recorded - topics):
        remarks.append(f"not converted: {', '.join(rest)}")
    return counts, remarks


def summary(counts: Counter[str]) -> list[str]:
    """Return the report: a line for each topic.

    If each channel has its own topic, one line covers all observation channels of a robot. Another line covers all
    action channels of the robot.
    """
    lines: dict[str, list[int]] = {}
    for topic, count in counts.items():
        channel = re.fullmatch(r"(/.+/robot_\d+/(?:observation|action)/).+", topic)
        lines.setdefault(f"{channel[1]}*" if channel else topic, []).append(count)
    return [
        f"{topic}: {sum(found)} messages" + (f", channels: {len(found)}" if topic.endswith("*") else "")
        for topic, found in lines.items()
    ]
