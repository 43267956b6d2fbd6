"""Reads whole recordings of one or several files.

The reader refuses a damaged file, except if only its index is damaged.
"""

from __future__ import annotations

import heapq
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import SessionError
from td3_robot.messages import Hello, Message, Start, Turn, Weights
from td3_robot.recording.decoder import Decoder
from td3_robot.recording.entries import CONFIG, METADATA, ON_THE_WAY_NS, REPEATED, Attachment, Entry, jumped
from td3_robot.recording.policies import head_of
from td3_robot.recording.session_file import Item, SessionFile, other_protocol
from td3_robot.util.text import one_line, printable

Kind = TypeVar("Kind", bound=Message)


def _begins(path: Path) -> int:
    """The receive time (ns) of the first message of a file; 0 without messages."""
    return next((entry.received for entry in SessionFile(path).entries()), 0)


class _Origin:
    """Finds out whether files are parts of one recording.

    A node stamps each message once, for all recorders. If two files hold the same message with different times of
    publishing, two processes sent it, and the files come from different recordings. This class compares every Hello and
    Start, and the first message of each stream in each file. The files of a node share its Start, because each file
    begins with a copy of it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str, int], tuple[int, Path]] = {}  # time of publishing, file

    def check(self, entry: Entry, path: Path, *, first: bool) -> None:
        """Compare a message with the earlier files. ``first`` says whether it is the first message of its stream.

        Raises:
            SessionError: the file and an earlier file come from different recordings.
        """
        published, other = self._known.get(entry.identity, (entry.published, path))
        if published != entry.published and other != path:
            raise SessionError(
                f"{str(other)!r} and {str(path)!r} come from different recordings: the times of their messages "
                f"{one_line(f'{entry.publisher}/{entry.topic}')} {entry.sequence} differ; give the parts of only one "
                "recording"
            )
        if first or entry.topic in (Hello.NAME, Start.NAME):
            self._known.setdefault(entry.identity, (entry.published, path))


class _Clocks:
    """Counts how often somebody set the clock of each node. Needs all entries of a recording, in recorded order."""

    def __init__(self) -> None:
        self._delay: dict[tuple[str, int], int] = {}  # of the node's newest message, in ns
        self._count: Counter[tuple[str, int]] = Counter()

    def setting(self, entry: Entry) -> tuple[tuple[str, int], int]:
        """The node of an entry, and how often somebody has set the node's clock so far.

        The recorder can repeat an old message of the topics in REPEATED, so these messages do not show a jump.
        """
        if entry.topic not in REPEATED:
            delay = entry.received - entry.published
            self._count[entry.node] += jumped(self._delay.get(entry.node, delay), delay)
            self._delay[entry.node] = delay
        return entry.node, self._count[entry.node]


class Session:
    """A recording: one file, or the parts that a recorder wrote, in any order.

    Attributes:
        paths: the files, in recorded order.
        metadata: the metadata that the recorder wrote.
        attachments: the attachments, by name.
        counts: number of messages by publisher, incarnation and topic.
        starts: the entry of each node's Start, by name and incarnation.
        turns: ``sequence`` of each node's first recorded Turn, by name and incarnation.
        left_out: whether the recording leaves out policies.
        policies: bytes of policies, by SHA-256. A replay fills this map with the policies that it computed because the
            recording leaves them out. :meth:`messages` puts them into the Weights messages.
        begin, end: times at which the first and the last message were received, in ns since 1970; 0 without messages.

    Raises:
        SessionError: a file cannot be read, is not a recording, or has another protocol version; or a file is damaged,
            except if only its index is damaged; or the files come from different recordings. Methods that read messages
            raise SessionError, too.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(sorted(paths, key=_begins) if len(paths) > 1 else paths)
        self.metadata: dict[str, str] = {}
        self.attachments: dict[str, Attachment] = {}
        self.counts: Counter[tuple[str, int, str]] = Counter()
        self.starts: dict[tuple[str, int], Entry] = {}
        self.turns: dict[tuple[str, int], int] = {}
        self.left_out = False
        self.policies: dict[str, bytes] = {}
        self.begin = self.end = 0
        self.decode = Decoder(repr(str(self.paths[0])))
        self._file = SessionFile(self.paths[0])
        # Shortest time from publishing to receiving, in ns, by node and setting of the node's clock.
        self._delay: dict[tuple[tuple[str, int], int], int] = {}
        clocks = _Clocks()
        for item in self._items():
            if isinstance(item, Entry):
                self._add(item)
                if item.topic not in REPEATED:
                    setting, delay = clocks.setting(item), item.received - item.published
                    self._delay[setting] = min(delay, self._delay.get(setting, delay))
            elif isinstance(item, Attachment):
                self.attachments.setdefault(item.name, item)
            elif item.name == METADATA:
                self.metadata = self.metadata or item.metadata
                self._check_protocol()
        self._check_protocol()

    def _add(self, entry: Entry) -> None:
        self.decode.learn(entry)
        self.begin, self.end = min(self.begin or entry.received, entry.received), max(self.end, entry.received)
        self.counts[entry.stream] += 1
        self.left_out |= (head := head_of(entry)) is not None and not head.payload
        if entry.topic == Start.NAME:
            self.starts.setdefault(entry.node, entry)
        elif entry.topic == Turn.NAME:
            self.turns.setdefault(entry.node, entry.sequence)

    def config(self) -> Config:
        """The resolved configuration.

        Raises:
            SessionError: it is missing or not YAML.
            ConfigError: this version does not understand it.
        """
        attached = self.attachments.get(CONFIG)
        if attached is None:
            raise SessionError(f"{self.decode.label} holds no {CONFIG}")
        try:
            return configuration.parse(yaml.safe_load(attached.data), source=f"{CONFIG} in {self.decode.label}")
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise SessionError(f"{CONFIG} in {self.decode.label} is not YAML: {' '.join(str(error).split())}") from None

    def require(self, topics: Iterable[str]) -> None:
        """Raise a SessionError if at least one of these topics has no message in the recording."""
        recorded = {topic for _, _, topic in self.counts}
        if absent := sorted(set(topics) - recorded):
            known = printable(", ".join(sorted(recorded))) or "nothing"
            raise SessionError(f"{self.decode.label} holds no {absent[0]!r}; it holds {known}")

    def entries(self, topics: Collection[str] = ()) -> Iterator[Entry]:
        """The entries of these topics, in recorded order, without repetitions. If ``topics`` is empty: all entries."""
        for item in self._items():
            if isinstance(item, Entry) and (not topics or item.topic in topics):
                yield item

    def timed(self, topics: Collection[str] = ()) -> Iterator[Entry]:
        """Like :meth:`entries`, but in the order of publishing, and with ``received`` corrected for delays.

        The correction assumes that every message of a node had the same delay as the node's fastest message. After
        a jump of the node's clock, the correction uses the fastest message after the jump.
        """
        clocks = _Clocks()
        waiting: list[tuple[int, int, Entry]] = []
        newest: dict[tuple[str, int], int] = {}
        for number, entry in enumerate(self.entries()):
            setting = clocks.setting(entry)
            if topics and entry.topic not in topics:
                continue
            delay = self._delay.get(setting, entry.received - entry.published)
            earliest = entry.received - ON_THE_WAY_NS
            # The clock of a node may jump. So keep the order of its messages, and stay near the received time.
            time = max(entry.published + delay, earliest, newest.get(entry.node, earliest))
            newest[entry.node] = time = min(time, entry.received)
            heapq.heappush(waiting, (time, number, replace(entry, received=time)))
            while waiting[0][0] < earliest:
                yield heapq.heappop(waiting)[2]
        while waiting:
            yield heapq.heappop(waiting)[2]

    def messages(self, topics: Collection[str] = ()) -> Iterator[tuple[Entry, Message]]:
        """Like :meth:`entries`, with the decoded message of each entry."""
        for entry in self.entries(topics):
            message = self.decode(entry)
            if isinstance(message, Weights) and not message.payload and message.sha256 in self.policies:
                message = msgspec.structs.replace(message, payload=self.policies[message.sha256])
            yield entry, message

    def messages_of(self, kind: type[Kind]) -> Iterator[tuple[Entry, Kind]]:
        """Like :meth:`messages`, for one type."""
        for entry, message in self.messages((kind.NAME,)):
            if isinstance(message, kind):
                yield entry, message

    def robots(self) -> Iterator[tuple[Entry, Hello]]:
        """The Hellos of simulators and drivers, with their entries."""
        return ((entry, hello) for entry, hello in self.messages_of(Hello) if hello.role in ROBOT_ROLES)

    @property
    def read_share(self) -> float:
        """How much of the current file has been read, from 0 to 1."""
        return self._file.read / self._file.size if self._file.size else 0.0

    def _items(self) -> Iterator[Item]:
        """The items of all files, without repeated messages.

        Each file after the first repeats some earlier messages. Files that a recorder writes from a ring buffer can
        also overlap.
        """
        newest: dict[tuple[str, int, str], int] = {}
        origin = _Origin()
        for path in self.paths:
            file = self._file = SessionFile(path)
            before, begun = dict(newest), set[tuple[str, int, str]]()
            for item in file.items():
                if isinstance(item, Entry):
                    if len(self.paths) > 1:
                        origin.check(item, path, first=item.stream not in begun)
                        begun.add(item.stream)
                    if item.sequence <= before.get(item.stream, -1):
                        continue
                    newest[item.stream] = max(item.sequence, newest.get(item.stream, -1))
                yield item
            if file.damages:
                raise SessionError(_damage_text(file))

    def _check_protocol(self) -> None:
        if problem := other_protocol(self.metadata):
            raise SessionError(f"{self.decode.label} was {problem}")


def _damage_text(file: SessionFile) -> str:
    damage, path, remedy = file.damages[0], repr(str(file.path)), f"td3-robot recover {shlex.quote(str(file.path))}"
    if damage.offset == file.read and file.being_written():
        return f"a recorder is writing {path}: wait until it ends, or copy the messages so far with {remedy}"
    return f"{path} is damaged at byte {damage.offset}: {damage.why}; mend it with {remedy}"
