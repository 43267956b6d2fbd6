"""Keeps the index of an open recording in a temporary file, so that the memory of a recorder does not grow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from mcap.data_stream import RecordBuilder
from mcap.records import ChunkIndex

from td3_robot.util import files


class ChunkIndexFile:
    """The index entries of a recording's chunks. ``mcap.writer.Writer`` uses this object instead of a list.

    The list would need 1 kB of memory for each chunk. A recorder closes a chunk every 0.5 s, or earlier at 4 MiB. So
    the list would grow by 7 MB per hour or more.

    Args:
        path: the recording. The temporary file is in the recording's folder, has no name, and needs 0.3 kB for
            each chunk.

    Raises:
        OSError: the temporary file cannot be written. Every method can raise it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with files.naming(path):
            self._file = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115

    def append(self, index: ChunkIndex) -> None:
        builder = RecordBuilder()
        index.write(builder)
        with files.naming(self._path):
            self._file.write(builder.end())

    def __iter__(self) -> Iterator[ChunkIndexFile]:
        """Yield only this object. Its :meth:`write` writes all entries at once."""
        yield self

    def write(self, builder: RecordBuilder) -> None:
        with files.naming(self._path):
            self._file.seek(0)
            builder.write(self._file.read())

    def close(self) -> None:
        with files.naming(self._path):
            self._file.close()
