"""The monitor's core: counts, rates and gaps of messages, the newest message of each topic, and faults."""

from __future__ import annotations

import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from td3_robot.core_types import Input, Output, Peer
from td3_robot.errors import SessionError
from td3_robot.messages import LifecycleChange, Message, Record, Status, Step
from td3_robot.monitor.summary import facts
from td3_robot.recording.decoder import Decoder
from td3_robot.recording.entries import Entry
from td3_robot.recording.faults import Faults
from td3_robot.recording.stream import Stream
from td3_robot.recording.values import Names, names_of
from td3_robot.transport.link import PEER_TIMEOUT

_STEPS = 2000  # the monitor keeps the times of this many Steps, to compute loop times

Listener = Callable[[Entry, Message, Names], None]


@dataclass
class Row:
    """One topic of one publisher."""

    incarnation: int
    stream: Stream
    last: Message | None = None  # the newest decoded message
    reported: int = 0  # number of messages at the last report


class Monitor:
    """A core that takes Records and makes reports.

    Args:
        epoch: Unix time in ns at which ``now`` of :meth:`step` is 0.
        listener: gets each Entry that the monitor can decode, its message, and the channel names of the message's
            source. For an unknown source, the names are empty.
    """

    def __init__(self, epoch: int, listener: Listener | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self._epoch = epoch
        self._listener = listener
        self._decode = Decoder("the monitor")
        self._rows: dict[tuple[str, str], Row] = {}
        self._names: dict[str, Names] = {}
        self._processes: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._faults = Faults()
        self._unreadable = ""
        self._stamps: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self.loop_ms: dict[str, list[float]] = {}
        self._begun: float | None = None
        self._reported = 0.0

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Count the received messages; ``now`` is the time on a monotonic clock, in seconds."""
        if self._begun is None:
            self._begun = self._reported = now
        for origin, message in inputs:
            if isinstance(origin, Peer) and isinstance(message, Record):
                self._take(Entry.offered(origin, message, self._epoch + int(now * 1e9)))
        return []

    def report(self, now: float) -> dict[str, Any]:
        """The report, as plain JSON values. Rates and loop times cover the time since the last report.

        ``loop_ms`` has the median and the longest loop time of each source. A loop begins with a Step S. It ends with
        the Step whose ``answered`` names S. Both Steps have a time stamp from the clock of the source.

        ``silent_s`` has the publishers that have sent nothing for :data:`PEER_TIMEOUT` seconds, with the age of their
        newest message in seconds.
        """
        begun = now if self._begun is None else self._begun
        elapsed, self._reported = now - self._reported, now
        loop_ms, self.loop_ms = self.loop_ms, {}
        ages: dict[str, float] = {}
        for (publisher, _), row in sorted(self._rows.items()):
            ages[publisher] = min(ages.get(publisher, math.inf), self._age(row, now))
        return {
            "time": round((self._epoch + int(now * 1e9)) * 1e-9, 3),
            "elapsed_s": round(now - begun, 3),
            "messages": self.counters["messages"],
            "unreadable": self.counters["unreadable"],
            "unreadable_last": self._unreadable,
            "topics": {
                f"{publisher}/{topic}": self._topic(row, elapsed, now)
                for (publisher, topic), row in sorted(self._rows.items())
            },
            "loop_ms": {
                source: {"median": round(statistics.median(times), 3), "longest": round(max(times), 3)}
                for source, times in sorted(loop_ms.items())
            },
            "processes": dict(sorted(self._processes.items())),
            "states": dict(sorted(self._states.items())),
            "silent_s": {publisher: age for publisher, age in ages.items() if age > PEER_TIMEOUT},
            "faults": self._faults.report(self._epoch + int(begun * 1e9)),
        }

    def _topic(self, row: Row, elapsed: float, now: float) -> dict[str, Any]:
        stream, new = row.stream, row.stream.count - row.reported
        row.reported = stream.count
        return {
            "count": stream.count,
            "rate_hz": round(new / elapsed, 3) if elapsed > 0 else None,
            "bytes": stream.size,
            "gaps": stream.gaps,
            "missing": stream.missing,
            "age_s": self._age(row, now),
            "last": facts(row.last) if row.last else {},
        }

    def _age(self, row: Row, now: float) -> float:
        """Return how long ago the newest message of a row arrived, in s."""
        return round(max(0.0, now - (row.stream.last - self._epoch) * 1e-9), 3)

    def _take(self, entry: Entry) -> None:
        self.counters["messages"] += 1
        row = self._rows.get((entry.publisher, entry.topic))
        if row is None or row.incarnation != entry.incarnation:
            row = Row(entry.incarnation, Stream(entry))
            self._rows[entry.publisher, entry.topic] = row
        row.stream.add(entry)
        if not self._decode.knows(entry):  # decoding needs an earlier Hello or Step of the same source
            return
        try:
            message = self._decode(entry)
            if (names := names_of(message)) is not None:
                self._names[entry.publisher] = names
                self._decode.sizes.pop(entry.publisher, None)  # a new process may have other robots
            self._decode.learn(entry)
        except SessionError as error:
            self.counters["unreadable"] += 1
            self._unreadable = str(error)
            return
        row.last = message
        self._faults.add(entry, message)
        if isinstance(message, Step):
            self._measure(message)
        elif isinstance(message, Status):
            self._processes[message.node] = message.state
        elif isinstance(message, LifecycleChange):
            self._states[message.node] = message.state
        if self._listener:
            self._listener(entry, message, self._names.get(getattr(message, "source", ""), {}))

    def _measure(self, step: Step) -> None:
        """Compute the loop time that ends with this Step."""
        answered = self._stamps.get((step.source, step.incarnation, step.answered))
        if answered is not None and step.answered != step.sequence:
            self.loop_ms.setdefault(step.source, []).append((step.stamp - answered) * 1e-6)
        self._stamps[step.source, step.incarnation, step.sequence] = step.stamp
        while len(self._stamps) > _STEPS:
            self._stamps.popitem(last=False)
