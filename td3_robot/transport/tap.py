"""Copies a node's messages to a recorder or monitor. The node never waits; it counts the messages not recorded."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import islice
from typing import NamedTuple

from td3_robot.core_types import Input
from td3_robot.messages import Bye, Hello, LifecycleChange, Message, Record, Start, Step, Turn, Weights
from td3_robot.topics import MONITOR, QUEUE_LENGTH, RECORDER, TOPICS
from td3_robot.transport import codec, turns
from td3_robot.transport.link import ClientLink, Frames

log = logging.getLogger(__name__)

RECORDED = frozenset(topic.message for topic in TOPICS if topic.recorded != "no")
_KEPT: dict[type[Message], int] = {Hello: 4, Start: 1, Weights: 2}
"""How many of the newest messages a recorder gets that starts later. It needs them to know whose Steps it records."""
_KEPT_FOR: dict[str, dict[type[Message], int]] = {MONITOR: {LifecycleChange: 64}}
"""The same, for one link only: a new monitor must show the state of every node."""
_MOST = 1024  # messages to gather in one turn, or for an expected recorder that has not connected yet
_MOST_BYTES = 1 << 25  # bytes of these messages: operators can load several policies
_AGAIN_S = 2.0
"""Seconds for which a tap keeps sent messages for a restarted recorder, and gathers new ones while it reconnects."""
_AGAIN_BYTES = 1 << 22
GATHERED_S = 0.1
"""Seconds between two sends. Waking the recorder costs as much as ten messages."""
_GATHERED_BYTES = 1 << 16  # bytes after which a tap sends at once
_STEPS = 2 * QUEUE_LENGTH  # Steps to remember: a source repeats Steps to a learner that reconnects
_RECENT = 4  # newest messages of a topic to compare with a new one


class _Batch(NamedTuple):
    """Messages that the tap sent to the recorder together, or could not send because there was no room.

    Attributes:
        time: of sending (s).
        size: bytes of the payloads.
        items: the Records with their numbers; the tap numbers all offered messages.
        unsent: the numbers of the Records that the tap never sent.
    """

    time: float
    size: int
    items: list[tuple[int, Record]]
    unsent: tuple[int, ...]


class Once:
    """Finds out whether a message is new, a repetition, or a copy for another subscriber."""

    def __init__(self) -> None:
        self._recent: dict[type[Message], deque[Message]] = {kind: deque(maxlen=_RECENT) for kind in RECORDED}
        self._steps: dict[tuple[int, int], None] = {}  # the newest ones, oldest first, by incarnation and sequence

    def first(self, message: Message) -> bool:
        """Whether this message is new and of a recorded type."""
        recent = self._recent.get(type(message))
        if recent is None:
            return False
        for other in recent:
            if message is other:
                return False
        recent.append(message)
        return not (isinstance(message, Step) and self._again(message))

    def _again(self, step: Step) -> bool:
        """Whether a Step is a repetition. A source repeats Steps, as new objects, to a learner that reconnects."""
        key = step.incarnation, step.sequence
        if key in self._steps:
            return True
        self._steps[key] = None
        if len(self._steps) > _STEPS:
            del self._steps[next(iter(self._steps))]
        return False


class Tap:
    """Makes one Record of each message that is sent, however many subscribers it has.

    Args:
        session: the handshake with the recorder. A node that the recorder refuses runs without recording.
        post: sends a topic name and a payload to the recorder; False if there is no recorder or no room.
        expected: whether the run has a recorder. If so, the first messages wait for it, and missed ones count from the
            start.
        wall: the wall clock, in nanoseconds since 1970.
    """

    def __init__(
        self,
        session: ClientLink,
        post: Callable[[str, bytes], bool],
        expected: bool = False,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._session = session
        self._post = post
        self._expected = expected
        self._wall = wall
        self._sequence: Counter[str] = Counter()
        self._once = Once()
        kept = {**_KEPT, **_KEPT_FOR.get(session.link, {})}
        # With their numbers, because the wall clock may jump.
        self._kept: dict[type[Message], deque[tuple[int, Record]]] = {
            kind: deque(maxlen=size) for kind, size in kept.items()
        }
        self._gathered: list[tuple[int, Record]] = []
        self._gathered_bytes = 0
        self._sent: deque[_Batch] = deque()  # newest last
        self._sent_bytes = 0
        self._meeting_until: float | None = None  # time (s), while a recorder that knew this node reconnects
        self._offered = 0
        self._early = expected
        self._pause = GATHERED_S if session.link == RECORDER else 0.0  # a monitor shows messages at once
        self._due = float("-inf")
        self._missed = 0

    def offer(self, link: str, message: Message, payload: bytes) -> None:
        """Record a message that was sent on a link."""
        if not self._once.first(message):
            return
        kind = type(message)
        sequence = self._sequence[message.NAME]
        self._sequence[message.NAME] = sequence + 1
        listens, kept = self._listens, self._kept.get(kind)
        if not listens and kept is None:
            self._missed += self._expected
            return
        record = Record(message.NAME, link, sequence, self._wall(), payload)
        self._offered += 1
        if listens:
            self._gathered.append((self._offered, record))
            self._gathered_bytes += len(payload)
        if kept is not None:
            kept.append((self._offered, record))

    def took(self, now: float, inputs: Sequence[Input]) -> None:
        """Record the inputs of a core's turn at ``now`` (s), before the turn runs.

        Only a recorder gets Turns. A monitor gets the inputs that their publishers do not offer.
        """
        turned = self._session.link == RECORDER
        if turned and not self._listens:
            self._sequence[Turn.NAME] += 1
            self._missed += self._expected
            return
        if turned:
            turn = turns.turn(now, inputs)
            self.offer(RECORDER, turn, codec.encode(turn))
        for message in turns.only_here(inputs):
            self.offer(RECORDER, message, codec.encode(message))

    @property
    def _listens(self) -> bool:
        """Whether to gather messages: a recorder is connected or expected, and there is room."""
        room = len(self._gathered) < _MOST and self._gathered_bytes < _MOST_BYTES
        return room and (self._early or self._meeting_until is not None or self._session.state == "welcome")

    def receive(self, frames: Frames, now: float) -> None:
        """Take a message of the recorder at ``now`` (s). A new recorder gets the messages kept for it."""
        before, knew = self._session.state, self._session.session
        if self._session.receive(frames, now):
            # A recorder drops repeated messages. A monitor does not, so a monitor that knows this node gets none twice.
            tell = self._session.link == RECORDER or knew != self._session.session
            kept = [item for items in self._kept.values() for item in items if tell]
            self._forget_sent(now)
            again = [item for batch in self._sent for item in batch.items]
            known = {number for number, _ in again} - {number for batch in self._sent for number in batch.unsent}
            self._gathered = sorted({**dict(kept), **dict(again), **dict(self._gathered)}.items())
            self._expected, self._early, self._meeting_until = True, False, None
            self._sent.clear()
            self._sent_bytes = 0
            self._send(now, known)
        self._lost(before, now)
        if self._session.refusal and before != "refused":
            log.warning(
                "the %s refuses this node and records nothing of it: %s",
                self._session.link,
                self._session.refusal.reason,
            )

    def flush(self, now: float, *, at_once: bool = False) -> None:
        """Send the gathered messages if they are due at ``now`` (s). Call this while no peer waits for this process."""
        due = at_once or now >= self._due or self._gathered_bytes > _GATHERED_BYTES
        if self._gathered and due and self._session.state == "welcome" and not self._greet(now):
            self._due = now + self._pause
            self._send(now)

    def turn(self, now: float) -> None:
        """Send the handshake's messages that are due at ``now`` (s)."""
        if self._meeting_until is not None and now > self._meeting_until:
            self._missed += len(self._gathered)
            self._gathered, self._gathered_bytes, self._meeting_until = [], 0, None
        before = self._session.state
        for message in self._session.due(now):
            self._post(message.NAME, codec.encode(message))
        self._lost(before, now)

    def leave(self, reason: str, now: float) -> None:
        """Send the remaining messages and a Bye at ``now`` (s), if there is a recorder."""
        if self._greet(now) or self._session.state == "welcome" or self._meeting_until is not None:
            self._send(now)
            self._post(Bye.NAME, codec.encode(Bye(reason)))

    def _greet(self, now: float) -> bool:
        """After a long silence the recorder may have forgotten this node: send Hello. Returns whether it sent one."""
        if not self._session.wake(now):
            return False
        self._lost("welcome", now)
        self.turn(now)
        return True

    def _lost(self, before: str, now: float) -> None:
        """Gather messages while a recorder that knew this node reconnects."""
        if before == "welcome" and self._session.state == "connecting" and self._session.link == RECORDER:
            self._meeting_until = now + _AGAIN_S

    def counts(self) -> Counter[str]:
        """The number of messages that the recorder missed since it was expected or connected.

        Messages that a monitor missed do not count: monitors come and go, and see the gaps themselves.
        """
        waiting = len(self._gathered) if self._early or self._meeting_until is not None else 0
        waiting += sum(len(batch.unsent) for batch in self._sent)
        missed = self._missed + waiting if self._session.link == RECORDER else 0
        return Counter({"not_recorded": missed}) + self._session.tally.counts

    def _send(self, now: float, known: Set[int] = frozenset()) -> None:
        """Post the gathered messages. The ``known`` ones were posted before: without room they are not lost."""
        items = iter(self._gathered)
        for records in _handfuls([record for _, record in self._gathered]):
            those = list(islice(items, len(records)))
            posted = self._post(Record.NAME, codec.encode_records(records))
            if self._session.link == RECORDER:
                unsent = () if posted else tuple(number for number, _ in those if number not in known)
                size = sum(len(record.payload) for record in records)
                self._sent.append(_Batch(now, size, those, unsent))
                self._sent_bytes += size
        self._gathered, self._gathered_bytes = [], 0
        self._forget_sent(now)

    def _forget_sent(self, now: float) -> None:
        """Forget the oldest sent messages: those that are too old or too many to send again."""
        while self._sent and (now - self._sent[0].time > _AGAIN_S or self._sent_bytes > _AGAIN_BYTES):
            batch = self._sent.popleft()
            self._sent_bytes -= batch.size
            self._missed += len(batch.unsent)


def _handfuls(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Split Records, in their order, into groups that fit one message."""
    begin = size = 0
    for number, record in enumerate(records):
        size += len(record.payload)
        if number > begin and (size > _GATHERED_BYTES or number - begin == codec.MOST_RECORDS):
            yield records[begin:number]
            begin, size = number, len(record.payload)
    if begin < len(records):
        yield records[begin:]
