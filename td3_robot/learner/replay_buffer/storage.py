"""Storage of a replay buffer's rows: in memory, or in a file that outlives the process.

The file survives a kill of the process, but not a power cut. The process first writes new rows to the operating system.
Then it records them in the journal. So a kill at any instant loses no recorded row, and no recorded row is incomplete.
The process never flushes the file to the disk, so its content may be wrong after a power cut. The rows are then lost,
because checkpoints do not contain them; the policy is not.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import BundleError
from td3_robot.util import files

Float32 = NDArray[np.float32]

ROWS, JOURNAL = "rows.float32", "journal"
_FORMAT = 2
_HEAD = 8  # bytes before a record: its length and CRC-32, little-endian
_LONGEST = 1 << 20  # bytes of a record
_COMPACT = 1 << 22  # bytes; a longer journal is rewritten with only the newest record of each source


class Storage(Protocol):
    """``capacity`` rows of ``width`` float32 numbers.

    Attributes:
        rows: float32[capacity, width], only for reading; :meth:`write` changes them.
        durable: committed rows survive a kill of the process.
        found: whether there are rows of an earlier process without notes.
        notes: the newest note of each source; an earlier process may have written it.
    """

    rows: Float32
    durable: bool
    found: bool
    notes: dict[str, Note]

    @property
    def committed(self) -> int:
        """Number of rows ever added, from the newest note; 0 without a note."""

    def write(self, first: int, rows: Float32) -> None:
        """Write float32[M, width] to M rows, starting at row ``first``."""

    def commit(self, note: Note) -> None:
        """Record in the journal that all rows written so far are complete; ``note`` describes them."""


class Memory:
    """Rows in memory."""

    durable = found = False

    def __init__(self, capacity: int, width: int) -> None:
        self.rows: Float32 = np.zeros((capacity, width), np.float32)
        self.notes: dict[str, Note] = {}
        self.committed = 0

    def write(self, first: int, rows: Float32) -> None:
        self.rows[first : first + len(rows)] = rows

    def commit(self, note: Note) -> None:
        pass


class Note(msgspec.Struct, frozen=True):
    """One record of the journal: the progress of the buffer and of one source.

    Attributes:
        total_added: rows ever added.
        env_steps: environment steps of the learner.
        source: name of the source whose Step was stored; empty for the recordings that a run starts with.
        state: of that source, as plain values, see ``Sources``.
        seen: statistics of all rows so far, as plain values, see ``Training.seen``.
    """

    total_added: int
    env_steps: int
    source: str
    state: dict[str, Any]
    seen: dict[str, Any]


class File:
    """Rows in the file ``rows.float32`` of a folder, read through a memory map, and a journal of the complete rows.

    Args:
        folder: created if missing.
        recovers: continue with the existing rows. False: start without them, and keep no journal.
        needed: the run needs existing rows; it is an error if they are missing.

    Attributes:
        notes: the newest record of each source; empty for a new file.

    Raises:
        BundleError: the rows are damaged, of a buffer of another shape, or missing though ``needed``. The files are
            then unchanged.
        OSError: the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, capacity: int, width: int, *, recovers: bool = True, needed: bool = False) -> None:
        self.durable = recovers
        self.notes: dict[str, Note] = {}
        self._shape = capacity, width
        self._rows_file, self._journal_file = folder / ROWS, folder / JOURNAL
        size, whole = self._rows_file.stat().st_size if self._rows_file.exists() else 0, 4 * capacity * width
        self.found = size == whole and not self._journal_file.exists()
        if recovers and self._journal_file.exists():
            self._recover()
        if recovers and (self.committed or needed) and size != whole:
            raise BundleError(
                f"replay file {str(self._rows_file)!r} has {size:,} bytes; the one that the run goes on with has "
                f"{whole:,}: bring it back, or begin another run"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = os.open(self._rows_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with files.naming(self._rows_file):
            os.posix_fallocate(self._rows, 0, whole)  # reserves the disk space now
        self.rows: Float32 = np.asarray(np.memmap(self._rows_file, np.float32, "r", shape=(capacity, width)))
        if recovers:
            self._compact()

    @property
    def committed(self) -> int:
        return max((note.total_added for note in self.notes.values()), default=0)

    def write(self, first: int, rows: Float32) -> None:
        # Not through the memory map: with it, a full disk would be a fatal signal instead of an error.
        if not len(rows):
            return
        content = np.ascontiguousarray(rows).data.cast("B")
        at = 4 * first * self._shape[1]
        with files.naming(self._rows_file):
            while content:
                written = os.pwrite(self._rows, content, at)
                content, at = content[written:], at + written

    def commit(self, note: Note) -> None:
        if not self.durable:
            return
        self.notes[note.source] = note
        record = _record(msgspec.msgpack.encode(note))
        self._size += len(record)
        with files.naming(self._journal_file):
            while record:  # on an almost full disk, a call may write only a part; the next call fails
                record = record[os.write(self._journal, record) :]
        if self._size > _COMPACT:
            os.close(self._journal)
            self._compact()

    def close(self) -> None:
        os.close(self._rows)
        if self.durable:
            os.close(self._journal)

    def _recover(self) -> None:
        """Read the journal. An incomplete last record is normal after a kill; any other fault is damage."""
        content = self._journal_file.read_bytes()
        payloads: list[bytes] = []
        at = 0
        while payload := _whole(content, at):
            payloads.append(payload)
            at += _HEAD + len(payload)
        where = f"replay journal {str(self._journal_file)!r}"
        if at < len(content) and not _cut_off(content, at):
            raise BundleError(
                f"{where} is damaged at byte {at}; bring it back, or move it away to go on from the newest checkpoint"
            )
        try:
            header = msgspec.msgpack.decode(payloads[0], type=dict[str, int]) if payloads else {}
            notes = [msgspec.msgpack.decode(payload, type=Note) for payload in payloads[1:]]
        except msgspec.MsgspecError as error:
            raise BundleError(f"{where} is damaged: {error}") from None
        if header != self._header():
            raise BundleError(f"{where} is for {header or 'nothing'}; this run needs {self._header()}")
        self.notes = {note.source: note for note in notes}

    def _compact(self) -> None:
        """Rewrite the journal with the newest notes only."""
        payloads = [msgspec.msgpack.encode(item) for item in (self._header(), *self.notes.values())]
        content = b"".join(map(_record, payloads))
        files.write_atomically(self._journal_file, content)
        self._journal = os.open(self._journal_file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = len(content)

    def _header(self) -> dict[str, int]:
        return {"format": _FORMAT, "capacity": self._shape[0], "width": self._shape[1]}


def _whole(content: bytes, at: int) -> bytes:
    """The payload of the record that starts at byte ``at``; empty if the record is not complete and correct."""
    length, check = (int.from_bytes(content[at + i : at + i + 4], "little") for i in (0, 4))
    if len(content) - at - _HEAD < length:
        return b""
    payload = content[at + _HEAD : at + _HEAD + length]
    return payload if zlib.crc32(payload) == check else b""


def _cut_off(content: bytes, at: int) -> bool:
    """Whether the record that starts at byte ``at`` is incomplete, as opposed to damaged.

    A record with a damaged length also looks incomplete, but complete records follow it.
    """
    if not any(content[at:]):  # a power cut can leave zeros behind the written bytes
        return True
    left, length = len(content) - at, int.from_bytes(content[at : at + 4], "little")
    if left > _LONGEST or _HEAD + length <= left:
        return False
    return not any(_whole(content, begin) for begin in range(at + 1, len(content) - _HEAD))


def _record(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def row_size(observation_size: int, action_size: int) -> int:
    """The number of float32 in a transition: two observations, the action, the reward and the discount."""
    return 2 * observation_size + action_size + 2
