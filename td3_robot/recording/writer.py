"""Writes one file of a recording. The writer ends a chunk every CHUNK_S. A crash loses only the unfinished chunk."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mcap.writer import CompressionType, Writer

from td3_robot.messages import MESSAGES, Weights
from td3_robot.recording import schemas
from td3_robot.recording.chunk_index import ChunkIndexFile
from td3_robot.recording.entries import METADATA, Attachment, Entry, Facts
from td3_robot.recording.policies import REFERENCE, StoredPolicies
from td3_robot.util import files, process_lock

CHUNK_S = 0.5  # time in s after which the writer closes a chunk
_CHUNK_BYTES = 4 << 20
PROFILE = "td3-robot"
_NO_SCHEMA = 0  # for a topic that this version does not know; ``recover`` and ``replay --update`` copy its messages


class _File(io.FileIO):
    """A file that adds its path to its write errors."""

    def write(self, data: Any, /) -> int:
        with files.naming(Path(str(self.name))):
            return super().write(data)


class SessionWriter:
    """One MCAP file. A reader can read complete chunks at any time. :meth:`close` adds the index.

    Each combination of publisher, incarnation, topic and link has its own channel. The channel's name, such as
    ``sim-0/step``, shows the publisher in viewers.

    Args:
        path: the file to write; it must not exist.
        facts: metadata and attachments. They come first in the file.
        now: time in seconds, on the same clock as in :meth:`turn`.

    Raises:
        OSError: the file exists, or cannot be written. Every method that writes also raises OSError if the file cannot
            be written.
    """

    def __init__(self, path: Path, facts: Facts, now: float) -> None:
        self.path = path
        self._file = io.BufferedWriter(_File(path, "x"))
        process_lock.hold(self._file.fileno())
        self._writer = Writer(self._file, _CHUNK_BYTES, CompressionType.ZSTD, enable_data_crcs=True)
        self._index = ChunkIndexFile(path)
        self._writer._Writer__chunk_indices = self._index  # type: ignore[attr-defined]
        self._schemas: dict[str, int] = {}
        self._channels: dict[tuple[str, int, str, str], int] = {}
        self._policies = StoredPolicies()
        self._due = now + CHUNK_S
        self._open = self._at = 0  # bytes in the open chunk, and length of the file when the chunk began
        self._writer.start(PROFILE)
        self._writer.add_metadata(METADATA, dict(facts.metadata))
        for attachment in facts.attachments:
            self.attach(attachment, 0)
        self._file.flush()

    def add(self, entry: Entry) -> None:
        """Add a message. If it holds a policy that is already in the file, add a reference to that policy."""
        entry = self._policies.stored(entry)
        channel = self._channels.get(entry.channel) or self._register(entry)
        published, sequence = max(0, entry.published), entry.sequence & 0xFFFFFFFF
        self._writer.add_message(channel, entry.received, entry.payload, published, sequence)
        self._open += len(entry.payload)

    def attach(self, attachment: Attachment, time_ns: int) -> None:
        self._writer.add_attachment(time_ns, time_ns, attachment.name, attachment.media_type, attachment.data)

    def turn(self, now: float) -> None:
        """Close the open chunk if CHUNK_S is over. Call this method at least every CHUNK_S, even without messages."""
        if now >= self._due:
            self._due = now + CHUNK_S
            self._writer.flush()

    def size(self) -> int:
        """Size of the file in bytes, plus the uncompressed size of the open chunk."""
        if self._file.tell() != self._at:
            self._at, self._open = self._file.tell(), 0
        return self._at + self._open

    def close(self) -> None:
        """Write the index, and close the file."""
        with contextlib.closing(self._index):
            if not self._file.closed:
                with self._file:  # closes the file even if the disk has no room for the index
                    self._writer.finish()

    def _register(self, entry: Entry) -> int:
        message = Weights if entry.topic == REFERENCE else MESSAGES.get(entry.topic)
        if message and entry.topic not in self._schemas:
            data = schemas.schema(message)
            self._schemas[entry.topic] = self._writer.register_schema(entry.topic, schemas.ENCODING, data)
        about = dict(zip(("publisher", "incarnation", "topic", "link"), map(str, entry.channel), strict=True))
        name = f"{entry.publisher}/{entry.topic}"
        channel = self._writer.register_channel(name, "msgpack", self._schemas.get(entry.topic, _NO_SCHEMA), about)
        self._channels[entry.channel] = channel
        return channel


def write(path: Path, facts: Facts, entries: Iterable[Entry]) -> None:
    """Write a whole file, with chunks like those of a recorder. The entries must be in recorded order.

    An error leaves no incomplete file.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    with files.creating(path), contextlib.closing(SessionWriter(path, facts, 0.0)) as writer:
        for entry in entries:
            writer.turn(entry.received * 1e-9)
            writer.add(entry)
