"""The messages of a core that wait for room on their links."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from td3_robot.core_types import Input, Output, Peer
from td3_robot.messages import Message, Step, Welcome
from td3_robot.topics import RECORDER
from td3_robot.transport.interface import Transport


class Outbox:
    """Sends a core's messages in their order.

    A full queue to a client costs the message. A full queue to a server holds everything back if the node is patient;
    otherwise it costs the message, too.

    Attributes:
        patient: wait for servers. A robot in real time must not.
        counters: ``undelivered`` counts lost messages.
    """

    def __init__(self, bus: Transport, counters: Counter[str]) -> None:
        self._bus = bus
        self.counters = counters
        self.patient = True
        self._waiting: deque[Output] = deque()

    def add(self, outputs: Iterable[Output]) -> None:
        self._waiting.extend(outputs)

    def forget_steps(self, inputs: Iterable[Input]) -> None:
        """Drop Steps that wait for a server whose Welcome just came: the core sends again what that server may lack."""
        servers = [origin for origin, message in inputs if isinstance(message, Welcome)]
        if servers:
            kept = (item for item in self._waiting if item[0] not in servers or not isinstance(item[1], Step))
            self._waiting = deque(kept)

    def flush(self) -> None:
        """Send as much as the links take now."""
        while self._waiting:
            to, message = self._waiting[0]
            # After a Welcome the core sends first what the server lacks. An earlier Step would look like a gap.
            early = isinstance(message, Step) and not isinstance(to, Peer) and not self._bus.welcome(to)
            if early or not self._bus.send(to, message):
                if self.patient and not isinstance(to, Peer):
                    return
                self.counters["undelivered"] += 1
                self._record(message)
            self._waiting.popleft()

    def close(self) -> None:
        """Record what still waits."""
        for _, message in self._waiting:
            self._record(message)

    def _record(self, message: Message) -> None:
        """Record a message that is not delivered: the core has sent it, and a replay compares it."""
        self._bus.send(RECORDER, message)
