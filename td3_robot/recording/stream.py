"""Statistics of one topic of one publisher: counts, rates and gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from td3_robot.recording.entries import ON_THE_WAY_NS, Entry


@dataclass
class Stream:
    """One topic of one publisher.

    Attributes:
        begins: sequence of its first message; above 0 if the recorder came later.
        first, last: when the first and the newest message were received, in ns since 1970.
        published: when the newest was published, by its publisher's clock.
        gaps, missing: places where the sequence jumps, and messages missing there.
        span: from the publishing of the first to that of the newest, in ns.
        longest: the longest time between the publishing of two messages, in seconds.
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
        # The publisher's clock is exact, unless it was set; the recorder's is never far off.
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
