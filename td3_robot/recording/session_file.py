"""Reads one file of a recording, whole or damaged.

The reader checks every length, and the checksum of a chunk or an attachment, before it uses the data.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import BinaryIO

import zstandard
from lz4.frame import LZ4FrameDecompressor
from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.records import Attachment as AttachmentRecord
from mcap.records import AttachmentIndex, Channel, Chunk, ChunkIndex, Header, Metadata, MetadataIndex, Statistics
from mcap.stream_reader import StreamReader

from td3_robot.errors import SessionError
from td3_robot.messages import PROTOCOL_VERSION, Weights
from td3_robot.recording.entries import Attachment, Entry
from td3_robot.recording.policies import REFERENCE, head_of, with_policy
from td3_robot.recording.writer import PROFILE
from td3_robot.util import files, process_lock

_MAGIC = b"\x89MCAP0\r\n"
_HEAD = struct.Struct("<BQ")  # of a record: opcode, length of the body
_FOOTER = struct.Struct("<BQQQI8s")  # head; begin of index (summary), begin of summary offsets, checksum; magic
_DATA_END = Opcode.DATA_END, 4  # opcode and length of the record between the data and the index
_MESSAGE = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_MAX_CHUNK = 1 << 28  # unpacked bytes; a recorder closes chunks at 4 MiB, and a message has at most 64 MiB

Item = Entry | Attachment | Metadata


@dataclass(frozen=True)
class Damage:
    """Damage in a file. ``offset`` is the byte where the damaged record or index begins, or where the file ends."""

    offset: int
    why: str


class SessionFile:
    """One file. The reader skips a damaged record.

    After a record with a damaged length, the reader continues at the next chunk that the index names. If the index is
    damaged or missing, the reader stops there.

    Attributes:
        damages: the damage that :meth:`items` has found in the data so far. Messages may be lost.
        index: the damage of the index at the end of the file. No messages are lost by this damage.
        counts: number of messages of each stream, from the index; None if the index is damaged or missing.
        size: size of the file in bytes.
        read: number of bytes read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damages: list[Damage] = []
        self.index: Damage | None = None
        self.counts: Counter[tuple[str, int, str]] | None = None
        self.size = self.read = 0
        self._channels: dict[int, tuple[str, int, str, str]] = {}
        self._places = _Places()
        self._references: set[int] = set()  # ids of the channels whose messages are references, see policies.py
        # Maps the SHA-256 of a policy to three numbers: the offset of the chunk that contains the policy's Weights, and
        # the begin and end of these Weights in the unpacked chunk.
        self._policies: dict[str, tuple[int, int, int]] = {}
        self._allowance = 0  # unpacked bytes that the remaining references in the current chunk are allowed to read

    @property
    def all_damages(self) -> list[Damage]:
        return [*self.damages, self.index] if self.index else [*self.damages]

    def being_written(self) -> bool:
        """Whether a process on this machine is writing the file. The file has no index until the process closes it."""
        with contextlib.suppress(OSError), files.open_regular(self.path) as file:
            return process_lock.is_locked(file.fileno())
        return False

    def items(self) -> Iterator[Item]:
        """All items of the file, in file order.

        Raises:
            SessionError: the file cannot be read, or is not a recording.
        """
        self.damages, self.index, self.counts = [], None, None
        self._channels, self._references, self._policies = {}, set(), {}
        self._places = _Places()
        try:
            with files.open_regular(self.path) as file:
                self.size = self.path.stat().st_size
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise SessionError(f"{str(self.path)!r} is not an MCAP file")
                self._read_index(file)
                yield from self._records(file)
        except OSError as error:
            raise SessionError(f"{str(self.path)!r} cannot be read: {error.strerror or error}") from None

    def entries(self) -> Iterator[Entry]:
        """Like :meth:`items`, without metadata and attachments."""
        return (item for item in self.items() if isinstance(item, Entry))

    def _records(self, file: BinaryIO) -> Iterator[Item]:
        checksum = zlib.crc32(_MAGIC)
        while True:
            self.read = offset = file.tell()
            if offset == self._places.index:  # the end of the data is damaged, and the index is whole
                self.read = self.size
                return
            head = file.read(_HEAD.size)
            following = self._places.after(offset)
            if problem := self._places.problem(offset, head, self.size):
                self._damaged(offset, problem)
                if following is None:
                    return
                file.seek(following)
                continue
            opcode, length = _HEAD.unpack(head)
            body = file.read(length)
            if (opcode, length) == _DATA_END:  # with another length, the record is damaged
                if int.from_bytes(body, "little") not in (0, checksum) and not self.damages:
                    self._damaged(offset, "the checksum of all data before this byte does not match")
                self._check_end(file.tell(), file.read())
                return
            checksum = zlib.crc32(body, zlib.crc32(head, checksum))
            try:
                items = self._items(opcode, body, offset)
            except SessionError:
                raise
            except Exception as error:  # the parsing libraries raise a dozen types of exceptions
                self._damaged(offset, f"{_name(opcode)} record: {type(error).__name__}: {str(error)[:200]}")
            else:
                yield from items

    def _check_end(self, offset: int, rest: bytes) -> None:
        """Check all bytes after the data: the index, and bytes that somebody has appended to the file."""
        self.index, self.read = _index_damage(offset, rest), self.size
        end = rest.find(_MAGIC) + len(_MAGIC)  # the magic bytes of the first footer, if they are intact
        if self.index and len(_MAGIC) <= end < len(rest):
            self.index, self.read = _index_damage(offset, rest[:end]), offset + end
            with contextlib.suppress(Exception):
                self._take_index(rest[:end])
            more = len(rest) - end
            other = (
                f"; another recording begins here; to copy it: tail -c {more} FILE > OTHER.mcap"
                if rest[end:].startswith(_MAGIC)
                else ""
            )
            self._damaged(self.read, f"the recording ends here, but {more} more bytes follow{other}")

    def _read_index(self, file: BinaryIO) -> None:
        """Read channels and message counts from the index, because the chunk that declares a channel may be damaged."""
        begin = file.tell()
        with contextlib.suppress(Exception):  # :meth:`_records` reports a damaged index later
            file.seek(-_FOOTER.size, SEEK_END)
            index = _FOOTER.unpack(file.read())[2]
            file.seek(index)
            places = self._take_index(file.read() if begin < index < self.size else b"")
            if self.counts is not None:
                self._places = _Places(places, begin, index)
        file.seek(begin)

    def _take_index(self, rest: bytes) -> dict[int, tuple[int, int]]:
        """Take channels and message counts from the index, if it is whole. ``rest`` ends with the footer.

        Returns opcode and length of each record that the index names, by offset.
        """
        counts: Counter[tuple[str, int, str]] = Counter()
        places: dict[int, tuple[int, int]] = {}
        if _index_damage(0, rest) is None:
            for record in StreamReader(BytesIO(rest), skip_magic=True).records:
                if isinstance(record, Channel):
                    self._add_channel(record)
                elif isinstance(record, Statistics):
                    for channel, count in record.channel_message_counts.items():
                        counts[self._channels[channel][:3]] += count
                elif isinstance(record, ChunkIndex):
                    places[record.chunk_start_offset] = Opcode.CHUNK, record.chunk_length - _HEAD.size
                elif isinstance(record, AttachmentIndex):
                    places[record.offset] = Opcode.ATTACHMENT, record.length - _HEAD.size
                elif isinstance(record, MetadataIndex):
                    places[record.offset] = Opcode.METADATA, record.length - _HEAD.size
            self.counts = counts
        return places

    def _add_channel(self, record: Channel) -> None:
        about, topic = record.metadata, record.metadata["topic"]
        if topic == REFERENCE:
            self._references.add(record.id)
            topic = Weights.NAME
        self._channels[record.id] = about["publisher"], int(about["incarnation"]), topic, about["link"]

    def _items(self, opcode: int, body: bytes, offset: int) -> list[Item]:
        stream = ReadDataStream(BytesIO(body))
        if opcode == Opcode.HEADER:
            if Header.read(stream).profile != PROFILE:
                if self._channels:  # the index shows that td3-robot wrote the file
                    raise ValueError("the header names another program")
                raise SessionError(f"{str(self.path)!r} is an MCAP file, but not a recording of td3-robot")
        elif opcode == Opcode.METADATA:
            return [Metadata.read(stream)]
        elif opcode == Opcode.ATTACHMENT:
            if zlib.crc32(body[:-4]) != int.from_bytes(body[-4:], "little"):
                raise ValueError("its checksum does not match")
            attached = AttachmentRecord.read(stream)
            return [Attachment(attached.name, attached.media_type, attached.data)]
        elif opcode == Opcode.CHUNK:
            return list(self._chunk(Chunk.read(stream), offset))
        return []

    def _chunk(self, chunk: Chunk, offset: int) -> Iterator[Entry]:
        """The messages of a chunk. The mcap library's reader, which this method replaces, takes ten times as long."""
        data = _unpacked(chunk)
        if chunk.uncompressed_crc not in (0, zlib.crc32(data)):
            raise ValueError("its checksum does not match")
        begin = unknown = 0
        self._allowance = _MAX_CHUNK
        while begin < len(data):
            opcode, length = _HEAD.unpack_from(data, begin)
            body = begin + _HEAD.size
            begin = body + length
            if begin > len(data):
                raise ValueError(f"it contains a record of {length} bytes, but ends within this record")
            if opcode == Opcode.MESSAGE:
                if length < _MESSAGE.size:
                    raise ValueError(f"it contains a message record of only {length} bytes")
                channel, sequence, received, published = _MESSAGE.unpack_from(data, body)
                about = self._channels.get(channel)
                if about is None:
                    unknown += 1
                    continue
                payload = body + _MESSAGE.size
                entry = Entry(*about, sequence, published, received, data[payload:begin])
                if channel in self._references:
                    entry = self._resolved(entry, data, offset)
                elif about[2] == Weights.NAME and (head := head_of(entry)):
                    self._policies.setdefault(head.sha256, (offset, payload, begin))
                yield entry
            elif opcode == Opcode.CHANNEL:
                self._add_channel(Channel.read(ReadDataStream(BytesIO(data[body:begin]))))
        if unknown:
            self._damaged(
                offset,
                f"the chunk has {unknown} messages of unknown channels, "
                "because a damaged record held the channels' names",
            )

    def _resolved(self, entry: Entry, data: bytes, offset: int) -> Entry:
        """The Weights entry for a reference.

        The chunk with the reference begins at ``offset``. ``data`` holds the unpacked records of this chunk.
        The entry has no policy if the file does not hold the policy.
        """
        head = head_of(entry)
        place = self._policies.get(head.sha256) if head else None
        if place is None:
            return entry
        chunk, begin, end = place
        if chunk != offset:
            with files.open_regular(self.path) as file:
                file.seek(chunk)
                _, length = _HEAD.unpack(file.read(_HEAD.size))
                data = _unpacked(Chunk.read(ReadDataStream(BytesIO(file.read(length)))))
        self._allowance -= len(data)  # a hostile file could name a large chunk a million times
        if self._allowance < 0:
            raise ValueError(f"its references to policies need more than {_MAX_CHUNK} bytes")
        original = head_of(replace(entry, payload=data[begin:end]))
        return with_policy(entry, original.payload) if original else entry

    def _damaged(self, offset: int, why: str) -> None:
        self.damages.append(Damage(offset, why))


class _Places:
    """The places of chunks, attachments and metadata in a file, from a whole index.

    Args:
        found: opcode and length of each record that the index names, by offset. An offset outside the data is ignored.
        begin: offset of the first record.
        index: offset of the index, directly after the end of the data; None if the index is damaged or missing.
    """

    def __init__(
        self, found: Mapping[int, tuple[int, int]] | None = None, begin: int = 0, index: int | None = None
    ) -> None:
        self.index = index
        self._found: dict[int, tuple[int, int]] = {}
        self._offsets: list[int] = []
        if index is not None:
            end = index - _HEAD.size - _DATA_END[1]
            known = {offset: place for offset, place in (found or {}).items() if begin <= offset < end}
            self._found = {**known, end: _DATA_END}
            self._offsets = [*sorted(self._found), index]

    def after(self, offset: int) -> int | None:
        """The next known place after ``offset``, or the index; None if there is none."""
        number = bisect_right(self._offsets, offset)
        return self._offsets[number] if number < len(self._offsets) else None

    def problem(self, offset: int, head: bytes, size: int) -> str:
        """What is wrong with the head of the record at ``offset``; empty if nothing. ``size`` is the file's size."""
        if len(head) < _HEAD.size:
            return "the file ends here" if head else "the file ends here, without its index"
        found = opcode, length = _HEAD.unpack(head)
        expected, following = self._found.get(offset, found), self.after(offset)
        if expected != found:
            return f"the head of the {_name(expected[0])} record of {expected[1]} bytes, which begins here, is damaged"
        if opcode == 0:
            return "no record begins here"
        if found == _DATA_END and following not in (None, self.index):
            return "the data ends here, but the index names more records"
        if length > (size if following is None else following) - offset - _HEAD.size:
            what = "the file ends" if following is None else "another record begins"
            return f"a record of {length} bytes begins here, but {what} within it"
        return ""


def _index_damage(offset: int, rest: bytes) -> Damage | None:
    """The damage of the index or the footer; None if both are whole."""
    if len(rest) < _FOOTER.size:
        return Damage(offset, "the file ends here, without its index")
    opcode, length, _, _, checksum, magic = _FOOTER.unpack(rest[-_FOOTER.size :])
    if (opcode, length, magic) != (Opcode.FOOTER, _FOOTER.size - _HEAD.size - len(_MAGIC), _MAGIC):
        return Damage(offset, "the index begins here, but the file does not end with a footer")
    if checksum not in (0, zlib.crc32(rest[: -len(_MAGIC) - 4])):
        return Damage(offset, "the checksum of the index, which begins here, does not match")
    return None


def _name(opcode: int) -> str:
    return Opcode(opcode).name.lower()


def _unpacked(chunk: Chunk) -> bytes:
    """The unpacked records of a chunk. Unpacks at most the bytes that the chunk declares, and at most _MAX_CHUNK."""
    size = chunk.uncompressed_size
    if size > _MAX_CHUNK:
        raise ValueError(f"it declares {size} bytes, more than a chunk may hold")
    if chunk.compression == "lz4":
        data: bytes = LZ4FrameDecompressor().decompress(chunk.data, size)
        return data
    if chunk.compression == "zstd":
        if zstandard.frame_content_size(chunk.data) != size:
            raise ValueError(f"it declares {size} bytes, but does not hold this number of bytes")
        return zstandard.ZstdDecompressor().decompress(chunk.data, size)
    return chunk.data


def other_protocol(metadata: Mapping[str, str]) -> str | None:
    """The reason why this version cannot read the messages of a recording; None if it can read them."""
    version = metadata.get("protocol", "none")
    if version == str(PROTOCOL_VERSION):
        return None
    return f"recorded with protocol version {version}; this version of td3-robot reads {PROTOCOL_VERSION}"
