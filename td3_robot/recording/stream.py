"""Statistics of a stream: counts, rates and gaps. A stream is one topic of one incarnation of a publisher."""

from __future__ import annotations

from typing import Any

from td3_robot.recording.entries import Entry, jumped


class Stream:
    """The statistics of a stream. Call :meth:`add` with every message, including the first.

    Attributes:
        first, last: times at which the first and the newest message were received, in ns since 1970.
        count, size: number of messages, and total size of their payloads in bytes.
        gaps, missing: number of jumps in the sequence, and number of messages missing in these jumps.
    """

    def __init__(self, begin: Entry) -> None:
        self.first = self.last = begin.received
        self.count = self.size = self.gaps = self.missing = 0
        self._begins_at = self._sequence = begin.sequence  # first and highest sequence
        self._published = begin.published
        self._span = 0  # ns between publishing the first and the newest message
        self._longest = 0.0  # longest time (s) between publishing two consecutive messages

    def add(self, entry: Entry) -> int:
        """Count a message. Returns the number of messages missing directly before it."""
        missing = max(0, entry.sequence - self._sequence - 1) if self.count else 0
        self.gaps += missing > 0
        self.missing += missing
        # The publisher's clock gives the exact time between two messages, except if somebody changes this clock.
        passed, about = entry.published - self._published, entry.received - self.last
        passed = about if jumped(passed, about) else passed
        self._span += passed
        self._longest = max(self._longest, passed * 1e-9)
        self._published = entry.published
        self._sequence, self.last = max(self._sequence, entry.sequence), max(self.last, entry.received)
        self.count += 1
        self.size += len(entry.payload)
        return missing

    def report(self) -> dict[str, Any]:
        """The statistics as plain JSON values. ``begins_at`` is the sequence of the first message in the file."""
        seconds = self._span * 1e-9
        return {
            "count": self.count,
            "rate_hz": round((self.count - 1) / seconds, 3) if seconds > 0 else None,
            "bytes": self.size,
            "begins_at": self._begins_at,
            "gaps": self.gaps,
            "missing": self.missing,
            "longest_s": round(self._longest, 4),
        }
