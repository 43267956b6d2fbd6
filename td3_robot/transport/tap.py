"""Copies a node's messages to its listeners, which are recorders and monitors.

The node never waits for a listener. It counts the messages that a recorder misses.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from td3_robot.core_types import Input
from td3_robot.messages import Bye, Hello, LifecycleChange, Message, Record, Start, Step, Turn, Weights
from td3_robot.topics import QUEUE_LENGTH, RECORDER, TOPICS
from td3_robot.transport import codec, turns
from td3_robot.transport.codec import Frames
from td3_robot.transport.link import ClientLink

RECORDED = frozenset(topic.message for topic in TOPICS if topic.recorded != "no")
_KEPT: dict[type[Message], int] = {Hello: 4, Start: 1, Weights: 2, LifecycleChange: 64}
"""Number of newest messages that a node keeps for a late recorder or monitor, by type.

A replay needs the Hellos, the Start and the Weights to make the core and to read the Steps. Only a monitor gets the
kept LifecycleChanges, because a monitor must show the state of every node.
"""
_MOST = 4096  # maximum number of messages that wait for the next send, or for a recorder that is not connected
_MOST_BYTES = 1 << 25  # maximum size of the gathered messages; a policy can have several MB
_RESEND_S = 2.0
"""For a recorder that restarts, a tap keeps each sent message for this many seconds.

After the loss of the recorder, the tap also gathers new messages for this many seconds.
"""
_RESEND_BYTES = 1 << 22
GATHERED_S = 0.1
"""Seconds between two sends to a recorder. Waking the recorder takes as long as sending ten messages."""
_GATHERED_BYTES = 1 << 16  # bytes after which a tap sends at once
_STEPS = 2 * QUEUE_LENGTH  # number of Steps to remember, because a source repeats Steps when a learner reconnects
_DEAF_S = 3.0  # s; a monitor that is silent for longer gets no messages, so that a suspended monitor takes no memory
_RECENT = 4  # number of newest messages of a topic to compare with a new message
_Kept = dict[type[Message], deque[tuple[int, Record]]]  # the newest Records with their numbers, by type of message


@dataclass(eq=False, slots=True)
class _Entry:
    """A Record, its number among all Records of the node, and whether the tap has sent it."""

    number: int
    record: Record
    sent: bool = False


class Deduplicator:
    """Detects messages that the caller has offered before.

    A node with several subscribers offers the same message several times.
    """

    def __init__(self) -> None:
        self._recent: dict[type[Message], deque[Message]] = {kind: deque(maxlen=_RECENT) for kind in RECORDED}
        self._steps: dict[tuple[int, int], None] = {}  # newest Steps, oldest first, by incarnation and sequence

    def is_new(self, message: Message) -> bool:
        """Whether this message is new and of a recorded type."""
        recent = self._recent.get(type(message))
        if recent is None:
            return False
        for other in recent:
            if message is other:
                return False
        recent.append(message)
        return not (isinstance(message, Step) and self._is_repeated(message))

    def _is_repeated(self, step: Step) -> bool:
        """Whether the source has sent this Step before. When a learner reconnects, a source also repeats old Steps."""
        key = step.incarnation, step.sequence
        if key in self._steps:
            return True
        self._steps[key] = None
        if len(self._steps) > _STEPS:
            del self._steps[next(iter(self._steps))]
        return False


class Copies:
    """Makes one Record of each message that a node sends, even if the node sends it to several subscribers.

    Args:
        wall: returns the time in ns for the stamps of the Records.

    Attributes:
        taps: each gets the Records for one listener.
    """

    def __init__(self, wall: Callable[[], int] = time.time_ns) -> None:
        self.taps: list[Tap] = []
        self._wall = wall
        self._sequence: Counter[str] = Counter()
        self._duplicates = Deduplicator()
        self._kept: _Kept = {kind: deque(maxlen=size) for kind, size in _KEPT.items()}
        self._newest = 0  # number of the newest Record

    def tap(self, session: ClientLink, post: Callable[[str, bytes], bool], expected: bool = False) -> Tap:
        """Add a tap for one more listener, which gets the kept messages first. For the arguments see :class:`Tap`."""
        result = Tap(session, post, self._kept, expected)
        self.taps.append(result)
        return result

    def offer(self, link: str, message: Message, payload: bytes | None = None) -> None:
        """Record a message that this node has sent on a link.

        If ``payload`` is None, encode the message, but only if a Record of it is made.
        """
        if self._duplicates.is_new(message):
            self._add(link, type(message), payload or partial(codec.encode, message))

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        """Record the inputs of a core's turn at ``now`` (s), before the turn runs.

        Only recorders get the Turn. Recorders and monitors get the inputs that no other node records.
        """
        self._add(RECORDER, Turn, lambda: codec.encode(turns.turn(now, inputs)))
        for message in turns.only_here(inputs):
            self.offer(RECORDER, message)

    def _add(self, link: str, kind: type[Message], payload: bytes | Callable[[], bytes]) -> None:
        """Count a message. Make its Record only if a tap takes it, or if the node keeps it for a late listener."""
        sequence = self._sequence[kind.NAME]
        self._sequence[kind.NAME] = sequence + 1
        taps, kept = [tap for tap in self.taps if tap.takes(kind)], self._kept.get(kind)
        if not taps and kept is None:
            return
        self._newest += 1
        content = payload if isinstance(payload, bytes) else payload()
        record = Record(kind.NAME, link, sequence, self._wall(), content)
        for tap in taps:
            tap.add(self._newest, record)
        if kept is not None:
            kept.append((self._newest, record))


class Tap:
    """Sends the Records of a node to one listener.

    Args:
        session: the handshake with the listener, which must not be essential: the node also runs without the listener.
        post: sends a topic name and a payload to the listener. It returns False if there is no listener or no room.
        kept: the newest Records of some types, for a new listener.
        expected: whether the run has a recorder. If True, the first messages wait until the recorder connects, and the
            tap counts missed messages from the start.
    """

    def __init__(self, session: ClientLink, post: Callable[[str, bytes], bool], kept: _Kept, expected: bool) -> None:
        self._session = session
        self._to_recorder = session.link == RECORDER
        self._post = post
        self._kept = {kind: kept[kind] for kind in kept if kind is not LifecycleChange or not self._to_recorder}
        self._expected = expected
        self._gathered: list[_Entry] = []
        self._gathered_bytes = 0
        self._sent: deque[tuple[float, list[_Entry]]] = deque()  # time of sending (s) and Records, newest last
        self._sent_bytes = 0
        self._reconnect_until: float | None = None  # time (s) until which the tap waits for the recorder to reconnect
        self._newest = 0  # number of the newest sent Record
        self._deaf = False  # the monitor is connected and silent
        self._before_first = expected  # the tap expects a recorder, and none has connected yet
        self._due = float("-inf")
        self._missed = 0

    def takes(self, kind: type[Message]) -> bool:
        """Return whether the caller must :meth:`add` a new message of this type. Count messages that a recorder misses.

        The tap takes a message if it has room, and if a listener is connected or a recorder is expected.
        """
        if kind is Turn and not self._to_recorder:
            return False
        room = len(self._gathered) < _MOST and self._gathered_bytes < _MOST_BYTES
        if room and (self._waits or (self._session.state == "welcome" and not self._deaf)):
            return True
        self._missed += self._expected and kind not in self._kept
        return False

    def add(self, number: int, record: Record) -> None:
        """Gather a Record for the next message to the listener."""
        self._gathered.append(_Entry(number, record))
        self._gathered_bytes += len(record.payload)

    @property
    def _waits(self) -> bool:
        """Whether gathered messages wait for a recorder that is not connected."""
        return self._before_first or self._reconnect_until is not None

    def receive(self, frames: Frames, now: float) -> list[Input]:
        """Take a message from the listener at ``now`` (s). Send the kept messages to a new listener.

        The result is always empty, because a listener sends no message to the core.
        """
        state, server = self._session.state, self._session.session
        if self._deaf:  # a suspended monitor is back: send it the kept messages that it missed
            self._deaf = False
            self._merge(self._kept_entries(after=self._newest))
        if self._session.receive(frames, now):
            # A recorder drops repeated messages. A monitor does not drop them, so it must get each message only once.
            new = self._to_recorder or server != self._session.session
            self._forget_sent(now)
            again = [entry for _, entries in self._sent for entry in entries]
            self._merge([*self._kept_entries(after=0 if new else self._newest), *again])
            self._expected, self._before_first, self._reconnect_until = True, False, None
            self._sent.clear()
            self._sent_bytes = 0
            self._send(now)
        self._note_loss(state, now)
        return []

    def _kept_entries(self, after: int) -> Iterator[_Entry]:
        """The kept Records whose numbers are higher than ``after``."""
        return (_Entry(number, record) for kept in self._kept.values() for number, record in kept if number > after)

    def _merge(self, entries: Iterable[_Entry]) -> None:
        """Add earlier entries to the gathered entries. The result is sorted by number, and has no entry twice."""
        merged = {entry.number: entry for entry in (*entries, *self._gathered)}
        self._gathered = [merged[number] for number in sorted(merged)]
        self._gathered_bytes = _size(self._gathered)

    def flush(self, now: float, *, at_once: bool = False) -> None:
        """Send the gathered messages if they are due at ``now`` (s). Call this while no peer waits for this process."""
        due = at_once or now >= self._due or self._gathered_bytes > _GATHERED_BYTES
        if self._gathered and due and self._session.state == "welcome" and not self._greet(now):
            self._due = now + (GATHERED_S if self._to_recorder else 0.0)  # a monitor shows messages at once
            self._send(now)

    def turn(self, now: float) -> None:
        """At ``now`` (s), give up a lost recorder, detect a silent monitor, and send the handshake's messages."""
        if self._reconnect_until is not None and now > self._reconnect_until:
            self._missed += len(self._gathered)
            self._gathered, self._gathered_bytes, self._reconnect_until = [], 0, None
        state = self._session.state
        silent = now - self._session.received_at > _DEAF_S
        if silent and not self._deaf and state == "welcome" and not self._to_recorder:
            self._deaf, self._gathered, self._gathered_bytes = True, [], 0
        for message in self._session.due(now):
            self._post(message.NAME, codec.encode(message))
        self._note_loss(state, now)

    def leave(self, reason: str, now: float) -> None:
        """Send the remaining messages and a Bye at ``now`` (s), if there is a listener."""
        if self._greet(now) or self._session.state == "welcome" or self._reconnect_until is not None:
            self._send(now)
            self._post(Bye.NAME, codec.encode(Bye(reason)))

    def _greet(self, now: float) -> bool:
        """Send Hello if this node was silent for a long time, because the listener has perhaps forgotten this node.

        Returns whether Hello was due.
        """
        if not self._session.needs_hello(now):
            return False
        self._note_loss("welcome", now)
        self.turn(now)
        return True

    def _note_loss(self, state: str, now: float) -> None:
        """If the session has just lost the recorder, gather messages for _RESEND_S.

        ``state`` is the session's earlier state.
        """
        if state == "welcome" and self._session.state == "connecting" and self._to_recorder:
            self._reconnect_until = now + _RESEND_S

    def counts(self) -> Counter[str]:
        """The number of messages that the recorder missed, and the link's counts.

        If the run's configuration has a recorder, counting begins at the start. Otherwise it begins when a recorder
        first connects. For a monitor, the number is always 0: a monitor may leave at any time, and it detects gaps
        itself.
        """
        missed = self._missed + len(self._gathered) * self._waits
        missed += sum(not entry.sent for _, entries in self._sent for entry in entries)
        return Counter({"not_recorded": missed * self._to_recorder}) + self._session.tally.counts

    def _send(self, now: float) -> None:
        """Post the gathered messages."""
        for entries in _handfuls(self._gathered):
            if self._post(Record.NAME, codec.encode_records([entry.record for entry in entries])):
                for entry in entries:
                    entry.sent = True
                self._newest = max(self._newest, entries[-1].number)
            if self._to_recorder:
                self._sent.append((now, entries))
                self._sent_bytes += _size(entries)
        self._gathered, self._gathered_bytes = [], 0
        self._forget_sent(now)

    def _forget_sent(self, now: float) -> None:
        """Forget the oldest sent messages if they are too old, or if the sent messages are too large to keep."""
        while self._sent and (now - self._sent[0][0] > _RESEND_S or self._sent_bytes > _RESEND_BYTES):
            _, entries = self._sent.popleft()
            self._sent_bytes -= _size(entries)
            self._missed += sum(not entry.sent for entry in entries)


def _size(entries: Sequence[_Entry]) -> int:
    return sum(len(entry.record.payload) for entry in entries)


def _handfuls(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Split entries, in their order, into groups that fit one message."""
    begin = size = 0
    for number, entry in enumerate(entries):
        size += len(entry.record.payload)
        if number > begin and (size > _GATHERED_BYTES or number - begin == codec.MOST_RECORDS):
            yield entries[begin:number]
            begin, size = number, len(entry.record.payload)
    if begin < len(entries):
        yield entries[begin:]
