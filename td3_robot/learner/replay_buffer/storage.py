"""Storage of a replay buffer's rows: in memory, or in a file that outlives the process.

The process first writes rows to the operating system, and then records them in the journal. So after a kill of the
process, every recorded row is complete. The process never flushes the file to the disk, so a power cut can lose rows.
The policy is in the checkpoints, so a power cut does not lose it.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from td3_robot.errors import BundleError
from td3_robot.specs import Float32
from td3_robot.util import files

ROWS, JOURNAL = "rows.float32", "journal"
_FORMAT = 2
_HEAD = 8  # bytes before the payload of a record: the payload's length and CRC-32, little-endian
_LONGEST = 1 << 20  # largest size of a record, in bytes
_COMPACT = 1 << 22  # bytes; a longer journal is rewritten with only the newest record of each source


class Note(msgspec.Struct, frozen=True):
    """One record of the journal: the progress of the buffer and of one source."""

    total_added: int  # number of rows ever added
    env_steps: int
    source: str  # the source of the newest Step; empty for the recordings that a run starts with
    state: dict[str, Any]  # progress of that source, see ``Source.state``
    seen: dict[str, Any]  # statistics of all rows so far, see ``Training.seen``


class Storage:
    """Rows in memory. :class:`File` keeps them in a file.

    Attributes:
        rows: float32[capacity, width]. Callers change them only with :meth:`write`.
        durable: whether recorded rows survive a kill of the process.
        found: whether an earlier process left rows but no journal.
        notes: the newest :class:`Note` of each source, by name. An earlier process may have written it.
    """

    durable = found = False

    def __init__(self, capacity: int, width: int) -> None:
        self.rows: Float32 = np.zeros((capacity, width), np.float32)
        self.notes: dict[str, Note] = {}

    @property
    def committed(self) -> int:
        """Number of rows ever added, from the newest note; 0 without a note."""
        return max((note.total_added for note in self.notes.values()), default=0)

    def write(self, first: int, rows: Float32) -> None:
        """Store ``rows``, beginning at row number ``first``."""
        self.rows[first : first + len(rows)] = rows

    def commit(self, note: Note) -> None:
        """Record in the journal that all rows written so far are complete."""


class File(Storage):
    """Rows in the file ``rows.float32`` of a folder. A journal in this folder records which rows are complete.

    ``rows`` is a read-only memory map of the file.

    Args:
        folder: created if missing.
        recovers: whether to continue with the existing rows. If False, start without rows and keep no journal.
        needed: whether missing rows are an error.

    Raises:
        BundleError: the journal is damaged or belongs to another buffer, the file of rows has a wrong size, or the
            file of rows is ``needed`` but missing. The files are then unchanged.
        OSError: the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, capacity: int, width: int, *, recovers: bool = True, needed: bool = False) -> None:
        self.durable = recovers
        self.notes = {}
        self._header = {"format": _FORMAT, "capacity": capacity, "width": width}
        self._rows_file, self._journal_file = folder / ROWS, folder / JOURNAL
        size, whole = self._rows_file.stat().st_size if self._rows_file.exists() else 0, 4 * capacity * width
        self.found = size == whole and not self._journal_file.exists()
        if recovers and self._journal_file.exists():
            self._recover()
        if recovers and (self.committed or needed) and size != whole:
            raise BundleError(
                f"replay file {str(self._rows_file)!r} has {size:,} bytes, and this run needs {whole:,}: "
                "restore the file, or start another run"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = os.open(self._rows_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with files.naming(self._rows_file):
            os.posix_fallocate(self._rows, 0, whole)  # reserves the disk space now
        self.rows = np.asarray(np.memmap(self._rows_file, np.float32, "r", shape=(capacity, width)))
        if recovers:
            self._compact()

    def write(self, first: int, rows: Float32) -> None:
        # If the disk is full, a write through the memory map kills the process. This write raises an error instead.
        if len(rows):
            content = np.ascontiguousarray(rows).data.cast("B")
            with files.naming(self._rows_file):
                _write(self._rows, content, 4 * first * self.rows.shape[1])

    def commit(self, note: Note) -> None:
        if not self.durable:
            return
        self.notes[note.source] = note
        record = _record(msgspec.msgpack.encode(note))
        with files.naming(self._journal_file):
            _write(self._journal, memoryview(record), self._size)
        self._size += len(record)
        if self._size > _COMPACT:
            os.close(self._journal)
            self._compact()

    def close(self) -> None:
        os.close(self._rows)
        if self.durable:
            os.close(self._journal)

    def _recover(self) -> None:
        """Read the journal. After a kill, an incomplete last record is normal. Any other error means damage."""
        content = self._journal_file.read_bytes()
        payloads: list[bytes] = []
        at = 0
        while payload := _payload(content, at):
            payloads.append(payload)
            at += _HEAD + len(payload)
        where = f"replay journal {str(self._journal_file)!r}"
        if at < len(content) and not _cut_off(content, at):
            raise BundleError(
                f"{where} is damaged at byte {at}; restore it, or move it away to continue from the newest checkpoint"
            )
        try:
            header = msgspec.msgpack.decode(payloads[0], type=dict[str, int]) if payloads else {}
            notes = [msgspec.msgpack.decode(payload, type=Note) for payload in payloads[1:]]
        except msgspec.MsgspecError as error:
            raise BundleError(f"{where} is damaged: {error}") from None
        if header != self._header:
            raise BundleError(f"{where} has the header {header}; this run needs {self._header}")
        self.notes = {note.source: note for note in notes}

    def _compact(self) -> None:
        """Rewrite the journal with the newest notes only."""
        content = b"".join(_record(msgspec.msgpack.encode(item)) for item in (self._header, *self.notes.values()))
        files.write_atomically(self._journal_file, content)
        self._journal = os.open(self._journal_file, os.O_WRONLY | os.O_CLOEXEC)
        self._size = len(content)


def _write(file: int, content: memoryview, at: int) -> None:
    """Write at byte ``at``. On an almost full disk, one system call may write only a part."""
    while content:
        written = os.pwrite(file, content, at)
        content, at = content[written:], at + written


def _payload(content: bytes, at: int) -> bytes:
    """The payload of the record that starts at byte ``at``; empty if the record is incomplete or damaged."""
    length, check = (int.from_bytes(content[at + i : at + i + 4], "little") for i in (0, 4))
    payload = content[at + _HEAD : at + _HEAD + length]
    return payload if len(payload) == length and zlib.crc32(payload) == check else b""


def _cut_off(content: bytes, at: int) -> bool:
    """Whether the record that starts at byte ``at`` is only incomplete, and not damaged.

    A record with a damaged length also looks incomplete, but complete records follow it.
    """
    if not any(content[at:]):  # a power cut can leave zeros after the written bytes
        return True
    left, length = len(content) - at, int.from_bytes(content[at : at + 4], "little")
    if left > _LONGEST or _HEAD + length <= left:
        return False
    return not any(_payload(content, begin) for begin in range(at + 1, len(content) - _HEAD))


def _record(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def row_size(observation_size: int, action_size: int) -> int:
    """The number of float32 values in a transition: two observations, the action, the reward and the discount."""
    return 2 * observation_size + action_size + 2
