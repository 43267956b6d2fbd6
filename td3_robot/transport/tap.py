"""Copies a node's messages to a listener: a recorder or a monitor.

The node never waits for a listener. It counts the messages that a recorder misses.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from td3_robot.core_types import Input
from td3_robot.messages import Bye, Hello, LifecycleChange, Message, Record, Start, Step, Turn, Weights
from td3_robot.topics import MONITOR, QUEUE_LENGTH, RECORDER, TOPICS
from td3_robot.transport import codec, turns
from td3_robot.transport.codec import Frames
from td3_robot.transport.link import ClientLink

log = logging.getLogger(__name__)

RECORDED = frozenset(topic.message for topic in TOPICS if topic.recorded != "no")
_KEPT: dict[type[Message], int] = {Hello: 4, Start: 1, Weights: 2}
"""Number of newest messages that a tap keeps for a late recorder or monitor, by type.

A replay needs these messages to make the core and to read the Steps.
"""
_KEPT_FOR: dict[str, dict[type[Message], int]] = {MONITOR: {LifecycleChange: 64}}
"""Types that a tap keeps in addition, by link. A new monitor must show the state of every node."""
_MOST = 1024  # maximum number of gathered messages, between two sends or until a recorder connects
_MOST_BYTES = 1 << 25  # maximum size of the gathered messages; a policy can have several MB
_RESEND_S = 2.0
"""Seconds for which a tap keeps sent messages, and gathers new messages, for a recorder that restarts."""
_RESEND_BYTES = 1 << 22
GATHERED_S = 0.1
"""Seconds between two sends to a recorder. Waking the recorder takes as much time as ten messages."""
_GATHERED_BYTES = 1 << 16  # bytes after which a tap sends at once
_STEPS = 2 * QUEUE_LENGTH  # number of Steps to remember, because a source repeats Steps when a learner reconnects
_DEAF_S = 3.0  # seconds of silence after which a monitor gets no messages, so that a suspended monitor takes no memory
_RECENT = 4  # number of newest messages of a topic to compare with a new message


@dataclass(eq=False, slots=True)
class _Entry:
    """A Record, its number among all Records of the tap, and whether the tap has sent it."""

    number: int
    record: Record
    sent: bool = False


class Deduplicator:
    """Detects messages that the caller has offered before. A node offers a message once for each subscriber."""

    def __init__(self) -> None:
        self._recent: dict[type[Message], deque[Message]] = {kind: deque(maxlen=_RECENT) for kind in RECORDED}
        self._steps: dict[tuple[int, int], None] = {}  # newest Steps, oldest first, by incarnation and sequence

    def copy(self) -> Deduplicator:
        """A Deduplicator that knows the same messages."""
        result = Deduplicator()
        result._recent = {kind: recent.copy() for kind, recent in self._recent.items()}
        result._steps = dict(self._steps)
        return result

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


class Tap:
    """Makes one Record of each message that a node sends, even if the node sends it to several subscribers.

    Args:
        session: the handshake with the listener. If the listener refuses a node, the node runs without this listener.
        post: sends a topic name and a payload to the listener. It returns False if there is no listener or no room.
        expected: whether the run has a recorder. If True, the first messages wait until the recorder connects, and the
            tap counts missed messages from the start.
    """

    def __init__(
        self,
        session: ClientLink,
        post: Callable[[str, bytes], bool],
        expected: bool = False,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._session = session
        self._to_recorder = session.link == RECORDER
        self._post = post
        self._expected = expected
        self._wall = wall
        self._sequence: Counter[str] = Counter()
        self._duplicates = Deduplicator()
        kept = {**_KEPT, **_KEPT_FOR.get(session.link, {})}
        self._kept: dict[type[Message], deque[_Entry]] = {kind: deque(maxlen=size) for kind, size in kept.items()}
        self._gathered: list[_Entry] = []
        self._gathered_bytes = 0
        self._sent: deque[tuple[float, list[_Entry]]] = deque()  # time of sending (s) and Records, newest last
        self._sent_bytes = 0
        self._reconnect_until: float | None = None  # time (s) until which the tap waits for the recorder to reconnect
        self._offered = 0
        self._newest = 0  # number of the newest sent Record
        self._deaf = False  # the monitor is connected and silent
        self._before_first = expected  # the tap expects a recorder, and none has connected yet
        self._due = float("-inf")
        self._missed = 0

    def fork(self, session: ClientLink, post: Callable[[str, bytes], bool]) -> Tap:
        """A tap for one more listener of this link. It copies the kept messages and continues the sequence numbers."""
        result = Tap(session, post, wall=self._wall)
        result._sequence = self._sequence.copy()
        result._duplicates = self._duplicates.copy()
        result._offered = self._offered
        for kind, entries in self._kept.items():
            result._kept[kind].extend(_Entry(entry.number, entry.record) for entry in entries)
        return result

    def needs(self, message: Message) -> bool:
        """Whether :meth:`offer` needs the payload of this message."""
        return self._gathers or type(message) in self._kept

    def offer(self, link: str, message: Message, payload: bytes) -> None:
        """Record a message that this node has sent on a link."""
        if not self._duplicates.is_new(message):
            return
        sequence = self._sequence[message.NAME]
        self._sequence[message.NAME] = sequence + 1
        gathers, kept = self._gathers, self._kept.get(type(message))
        if not gathers and kept is None:
            self._missed += self._expected
            return
        self._offered += 1
        entry = _Entry(self._offered, Record(message.NAME, link, sequence, self._wall(), payload))
        if gathers:
            self._gathered.append(entry)
            self._gathered_bytes += len(payload)
        if kept is not None:
            kept.append(entry)

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        """Record the inputs of a core's turn at ``now`` (s), before the turn runs.

        Only a recorder gets the Turn. Recorders and monitors get the inputs that no other node records.
        """
        if self._to_recorder and not self._gathers:  # count the Turn without making it
            self._sequence[Turn.NAME] += 1
            self._missed += self._expected
        elif self._to_recorder:
            turn = turns.turn(now, inputs)
            self.offer(RECORDER, turn, codec.encode(turn))
        for message in turns.only_here(inputs):
            self.offer(RECORDER, message, codec.encode(message))

    @property
    def _gathers(self) -> bool:
        """Whether to gather messages: there is room, and a listener takes them or they wait for a recorder."""
        room = len(self._gathered) < _MOST and self._gathered_bytes < _MOST_BYTES
        return room and (self._waits or (self._session.state == "welcome" and not self._deaf))

    @property
    def _waits(self) -> bool:
        """Whether gathered messages wait for a recorder that is not connected."""
        return self._before_first or self._reconnect_until is not None

    def receive(self, frames: Frames, now: float) -> list[Input]:
        """Take a message from the listener at ``now`` (s). Send the kept messages to a new listener.

        The result is always empty, because a listener sends no message to the core.
        """
        state, server = self._session.state, self._session.session
        if self._deaf:  # the monitor missed kept messages while it was suspended
            self._deaf = False
            self._gathered = [e for kept in self._kept.values() for e in kept if e.number > self._newest]
            self._gathered.sort(key=lambda entry: entry.number)
        if self._session.receive(frames, now):
            # A recorder drops repeated messages. A monitor does not drop them, so it must get each message only once.
            new = self._to_recorder or server != self._session.session
            kept = [entry for entries in self._kept.values() for entry in entries if new]
            self._forget_sent(now)
            again = [entry for _, entries in self._sent for entry in entries]
            self._gathered = sorted({*kept, *again, *self._gathered}, key=lambda entry: entry.number)
            self._expected, self._before_first, self._reconnect_until = True, False, None
            self._sent.clear()
            self._sent_bytes = 0
            self._send(now)
        self._note_loss(state, now)
        if self._session.refusal and state != "refused":
            reason = self._session.refusal.reason
            log.warning("the %s refuses this node and gets none of its messages: %s", self._session.link, reason)
        return []

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
        """Send Hello after a long silence: the listener may have forgotten this node. Returns whether Hello was due."""
        if not self._session.needs_hello(now):
            return False
        self._note_loss("welcome", now)
        self.turn(now)
        return True

    def _note_loss(self, state: str, now: float) -> None:
        """If the recorder was connected (the earlier ``state``) and is lost now, gather messages for _RESEND_S."""
        if state == "welcome" and self._session.state == "connecting" and self._to_recorder:
            self._reconnect_until = now + _RESEND_S

    def counts(self) -> Counter[str]:
        """The number of messages that the recorder missed since it was expected or connected, and the link's counts.

        This excludes messages that a monitor missed: a monitor may leave, and it detects gaps itself.
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
