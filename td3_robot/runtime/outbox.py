"""A queue for messages of a core. Messages wait in it until a link can send them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from td3_robot.core_types import Input, Output, Peer
from td3_robot.messages import Message, Step, Welcome
from td3_robot.topics import RECORDER
from td3_robot.transport.interface import Transport


class Outbox:
    """Sends a core's messages in order.

    If the queue of a link to a client is full, the outbox drops the message. If the queue of a link to a server is
    full, a patient outbox keeps this message and all later messages until the queue has room. An outbox that is not
    patient drops the message. Until a server sends its Welcome, the queue to this server counts as full for Steps.

    Attributes:
        patient: whether to wait for room in the queues to servers. Must be False for a robot in real time.
        counters: ``undelivered`` counts the messages that :meth:`flush` drops.
    """

    def __init__(self, bus: Transport, counters: Counter[str]) -> None:
        self._bus = bus
        self.counters = counters
        self.patient = True
        self._waiting: deque[Output] = deque()

    def add(self, outputs: Iterable[Output]) -> None:
        self._waiting.extend(outputs)

    def forget_steps(self, inputs: Iterable[Input]) -> None:
        """Drop the waiting Steps for a server that has sent a Welcome. The core resends the necessary Steps."""
        servers = [origin for origin, message in inputs if isinstance(message, Welcome)]
        if servers:
            kept = (item for item in self._waiting if item[0] not in servers or not isinstance(item[1], Step))
            self._waiting = deque(kept)

    def flush(self) -> None:
        """Send the waiting messages. A patient outbox stops at a message that a link to a server cannot take."""
        while self._waiting:
            to, message = self._waiting[0]
            # No Step goes out before the server's Welcome. After the Welcome, the core first resends the Steps that the
            # server lacks. A newer Step that arrives before the resent Steps would look like a gap in the sequence.
            early = isinstance(message, Step) and not isinstance(to, Peer) and not self._bus.welcome(to)
            if early or not self._bus.send(to, message):
                if self.patient and not isinstance(to, Peer):
                    return
                self.counters["undelivered"] += 1
                self._record(message)
            self._waiting.popleft()

    def close(self) -> None:
        """Record the messages that the outbox has not sent."""
        for _, message in self._waiting:
            self._record(message)

    def _record(self, message: Message) -> None:
        """Record an undelivered message. A replay needs this message, because it compares all messages of the core."""
        self._bus.send(RECORDER, message)
