"""What a node publishes, offered to the recorder: never waited for, and counted where it is not taken."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from td3_robot.messages import Bye, Hello, Message, Record, Start, StateChange, Step, Turn, Weights
from td3_robot.topics import MONITOR, QUEUE_LENGTH, RECORDER, TOPICS
from td3_robot.transport import codec, turns
from td3_robot.transport.session import ClientSession, Frames, Input

log = logging.getLogger(__name__)

RECORDED = frozenset(topic.message for topic in TOPICS if topic.recorded != "no")
_KEPT: dict[type[Message], int] = {Hello: 4, Start: 1, Weights: 2}
"""The last so many are told a recorder that comes later: without them it could not tell whose Steps it sees."""
_KEPT_FOR: dict[str, dict[type[Message], int]] = {MONITOR: {StateChange: 64}}
"""The same for one link: who begins to watch wants to know what state everybody is in."""
_EARLY = 1024  # messages held back for a recorder that is expected and not there yet
_EARLY_BYTES = 1 << 25  # and how large they may be in all: operators may load policy after policy
_AGAIN = 2 * QUEUE_LENGTH  # Steps known by number: a source sends what a learner may not have seen once more
_RECENT = 4  # messages of a topic looked at to see whether this one was offered already


class Once:
    """Tells what is said for the first time from what is only sent to one more."""

    def __init__(self) -> None:
        self._recent: dict[type[Message], deque[Message]] = {kind: deque(maxlen=_RECENT) for kind in RECORDED}
        self._steps: dict[tuple[int, int], None] = {}  # incarnation and sequence of the newest, oldest first

    def first(self, message: Message) -> bool:
        """Whether this message is one to be recorded, and was not seen before."""
        recent = self._recent.get(type(message))
        if recent is None:
            return False
        for other in recent:
            if message is other:
                return False
        recent.append(message)
        return not (isinstance(message, Step) and self._again(message))

    def _again(self, step: Step) -> bool:
        """Whether a Step was seen before: to a learner that came back it is sent once more, as another object."""
        key = step.incarnation, step.sequence
        if key in self._steps:
            return True
        self._steps[key] = None
        if len(self._steps) > _AGAIN:
            del self._steps[next(iter(self._steps))]
        return False


class Tap:
    """Turns each message object that is sent, to however many subscribers, into one Record.

    Args:
        session: the handshake with the recorder; where it refuses us, we go on without one.
        post: sends a topic name and a payload to the recorder; False where there is no recorder or no room.
        expected: a recorder is part of the run: the first messages wait for it, and what it misses counts from the
            beginning.
        wall: the wall clock, in nanoseconds since 1970.
    """

    def __init__(
        self,
        session: ClientSession,
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
        # With their place in the order in which all were offered, which the wall clock, that may jump, does not tell.
        self._kept: dict[type[Message], deque[tuple[int, Record]]] = {
            kind: deque(maxlen=size) for kind, size in kept.items()
        }
        self._early: list[tuple[int, Record]] | None = [] if expected else None
        self._offered = 0
        self._early_bytes = 0
        self._missed = 0

    def offer(self, link: str, message: Message, payload: bytes) -> None:
        """Take note of a message that went out on a link."""
        if not self._once.first(message):
            return
        kind = type(message)
        sequence = self._sequence[message.NAME]
        self._sequence[message.NAME] = sequence + 1
        welcome, early = self._welcome, self._is_early
        if not (welcome or early or kind in self._kept):
            self._missed += self._expected
            return
        record = Record(message.NAME, link, sequence, self._wall(), payload)
        self._offered += 1
        if welcome:
            self._send(record)
        elif self._early is not None and early and kind not in self._kept:
            self._early.append((self._offered, record))
            self._early_bytes += len(payload)
        if kind in self._kept:
            self._kept[kind].append((self._offered, record))

    def took(self, now: float, inputs: Sequence[Input]) -> None:
        """Take note of what a core is told in its turn at ``now`` (s), before it says anything.

        Turns are for a recorder. Whoever watches is told only what nobody else would offer.
        """
        turned = self._session.link == RECORDER
        if turned and not (self._welcome or self._is_early):
            self._sequence[Turn.NAME] += 1
            self._missed += self._expected
            return
        if turned:
            turn = turns.turn(now, inputs)
            self.offer(RECORDER, turn, codec.encode(turn))
        for message in turns.only_here(inputs):
            self.offer(RECORDER, message, codec.encode(message))

    @property
    def _welcome(self) -> bool:
        return self._session.state == "welcome"

    @property
    def _is_early(self) -> bool:
        return self._early is not None and len(self._early) < _EARLY and self._early_bytes < _EARLY_BYTES

    def receive(self, frames: Frames, now: float) -> None:
        """Take what came from the recorder; ``now`` in seconds. One that is new is told what it has to know."""
        before = self._session.state
        if self._session.receive(frames, now):
            told = [*(self._early or ()), *(item for kept in self._kept.values() for item in kept)]
            self._expected, self._early = True, None
            for _, record in sorted(told, key=lambda item: item[0]):
                self._send(record)
        if self._session.refusal and before != "refused":
            log.warning("the %s refuses us and is told nothing: %s", self._session.link, self._session.refusal.reason)

    def turn(self, now: float) -> None:
        """What the handshake has to send at this time (s)."""
        for message in self._session.due(now):
            self._post(message.NAME, codec.encode(message))

    def leave(self, reason: str) -> None:
        """Say Bye, if there is anybody to say it to."""
        if self._session.state == "welcome":
            self._post(Bye.NAME, codec.encode(Bye(reason)))

    def counts(self) -> Counter[str]:
        """What was published and not recorded, once a recorder was expected or there.

        What a monitor missed is its own affair: it sees the gaps, and comes and goes.
        """
        missed = self._missed + len(self._early or ()) if self._session.link == RECORDER else 0
        return Counter({"not_recorded": missed}) + self._session.tally.counts

    def _send(self, record: Record) -> None:
        if not self._post(record.NAME, codec.encode(record)):
            self._missed += 1
