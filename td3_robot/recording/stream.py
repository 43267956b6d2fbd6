"""Statistics of one topic of one publisher: counts, rates and gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from td3_robot.recording.entries import ON_THE_WAY_NS, Entry


@dataclass
class Stream:
    """One topic of one publisher.

    Attributes:
        begins: sequence of the first message; above 0 if the publisher began before the recorder.
        first, last: times at which the first and the newest message were received, in ns since 1970.
        published: time at which the newest message was published, in ns, by the clock of its publisher.
        sequence: the highest sequence so far.
        count, size: number of messages, and bytes of their payloads.
        span: time between publishing the first and the newest message, in ns.
        gaps, missing: number of jumps in the sequence, and number of messages missing there.
        longest: longest time between publishing two consecutive messages, in seconds.
    """

    begins: int
    first: int
    last: int
    published: int
    sequence: int
    count: int = 0
    size: int = 0
    span: int = 0
    gaps: int = 0
    missing: int = 0
    longest: float = 0.0

    @classmethod
    def beginning(cls, entry: Entry) -> Stream:
        """A stream that begins with this message; :meth:`add` counts it."""
        return cls(entry.sequence, entry.received, entry.received, entry.published, entry.sequence)

    def add(self, entry: Entry) -> None:
        if self.count and entry.sequence > self.sequence + 1:
            self.gaps += 1
            self.missing += entry.sequence - self.sequence - 1
        # The publisher's clock is exact, unless somebody sets it. The recorder's clock shows whether that happened.
        passed, about = entry.published - self.published, entry.received - self.last
        passed = passed if abs(passed - about) <= ON_THE_WAY_NS else about
        self.span += passed
        self.longest = max(self.longest, passed * 1e-9)
        self.published = entry.published
        self.sequence, self.last = max(self.sequence, entry.sequence), max(self.last, entry.received)
        self.count += 1
        self.size += len(entry.payload)

    def report(self) -> dict[str, Any]:
        seconds = self.span * 1e-9
        return {
            "count": self.count,
            "rate_hz": round((self.count - 1) / seconds, 3) if seconds > 0 else None,
            "bytes": self.size,
            "begins_at": self.begins,
            "gaps": self.gaps,
            "missing": self.missing,
            "longest_s": round(self.longest, 4),
        }
