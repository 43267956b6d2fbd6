"""Writes one recording. It closes chunks by time, so that a crash loses no more than one chunk."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mcap.writer import CompressionType, Writer

from td3_robot.messages import MESSAGES
from td3_robot.recording import schemas
from td3_robot.recording.entries import METADATA, Attachment, Entry, Facts
from td3_robot.util import files

CHUNK_S = 0.5
"""Seconds after which data goes to the operating system, and survives this process."""
_CHUNK_BYTES = 4 << 20
PROFILE = "td3-robot"


class _File(io.FileIO):
    """A file whose write errors name it."""

    def write(self, data: Any, /) -> int:
        with files.naming(Path(str(self.name))):
            return super().write(data)


class SessionWriter:
    """One MCAP file. It is readable from its first chunk on, and whole when closed.

    A channel is one topic of one publisher and link, so that viewers show robots apart: ``sim-0/step``.

    Args:
        path: must not exist.
        facts: written first.
        now: seconds, of the clock of :meth:`turn`.

    Raises:
        OSError: the file exists, or cannot be written; from every method.
    """

    def __init__(self, path: Path, facts: Facts, now: float) -> None:
        self.path = path
        self.begun = now
        self.messages = 0
        self._file = io.BufferedWriter(_File(path, "x"))
        # LZ4, because most bytes are weights, which hardly shrink, and zstd takes 5 times as long.
        self._writer = Writer(self._file, _CHUNK_BYTES, CompressionType.LZ4, enable_data_crcs=True)
        self._schemas: dict[str, int] = {}
        self._channels: dict[tuple[str, int, str, str], int] = {}
        self._due = now + CHUNK_S
        self._open = self._at = 0  # bytes added since the file had that length
        self._writer.start(PROFILE)
        self._writer.add_metadata(METADATA, dict(facts.metadata))
        for attachment in facts.attachments:
            self.attach(attachment, 0)
        self._file.flush()

    def add(self, entry: Entry) -> None:
        """Write a message."""
        channel = self._channels.get(entry.channel) or self._register(entry)
        self._writer.add_message(
            channel, entry.received, entry.payload, max(0, entry.published), entry.sequence & 0xFFFFFFFF
        )
        self.messages += 1
        self._open += len(entry.payload)

    def attach(self, attachment: Attachment, time_ns: int) -> None:
        """Add an attachment."""
        self._writer.add_attachment(time_ns, time_ns, attachment.name, attachment.media_type, attachment.data)

    def turn(self, now: float) -> None:
        """Close the chunk if it is old enough. Call this more often than every CHUNK_S, even without messages."""
        if now >= self._due:
            self._due = now + CHUNK_S
            self._writer.flush()

    def size(self) -> int:
        """Bytes of the file so far, with the open chunk before compression."""
        if self._file.tell() != self._at:
            self._at, self._open = self._file.tell(), 0
        return self._at + self._open

    def close(self) -> None:
        """Write the index, and close the file."""
        if not self._file.closed:
            with self._file:  # closes it even if the disk has no room for the index
                self._writer.finish()

    def _register(self, entry: Entry) -> int:
        if entry.topic not in self._schemas:
            data = schemas.schema(MESSAGES[entry.topic])
            self._schemas[entry.topic] = self._writer.register_schema(entry.topic, schemas.ENCODING, data)
        about = {
            "publisher": entry.publisher,
            "incarnation": str(entry.incarnation),
            "topic": entry.topic,
            "link": entry.link,
        }
        name = f"{entry.publisher}/{entry.topic}"
        channel = self._writer.register_channel(name, "msgpack", self._schemas[entry.topic], about)
        self._channels[entry.channel] = channel
        return channel


def write(path: Path, facts: Facts, entries: Iterable[Entry]) -> None:
    """Write a whole file with chunks like a recorder's.

    Args:
        path: must not exist.
        entries: in recorded order.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    writer = SessionWriter(path, facts, 0.0)
    for entry in entries:
        writer.turn(entry.received * 1e-9)
        writer.add(entry)
    writer.close()
