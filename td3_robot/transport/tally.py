"""Counts and logs events on a link, such as malformed, refused and unexpected messages."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

LOG_PERIOD = 10.0
"""Seconds between two log lines about the same kind of event."""

_LONGEST_LINE = 1000  # characters of a log line


@dataclass
class Tally:
    """Counts events by kind. For each kind, it logs the first event, and later at most one event in LOG_PERIOD.

    Attributes:
        last: time (s) and text of the newest event; minus infinity and an empty text before the first event.
    """

    counts: Counter[str] = field(default_factory=Counter)
    last: tuple[float, str] = (float("-inf"), "")
    _logged: dict[str, float] = field(default_factory=dict)

    def note(self, kind: str, text: str, now: float, verb: str = "dropped") -> None:
        self.counts[kind] += 1
        line = text[:_LONGEST_LINE]
        self.last = now, f"{kind}: {line}"
        if now - self._logged.get(kind, float("-inf")) >= LOG_PERIOD:
            self._logged[kind] = now
            if not line.isprintable():  # a peer may have written part of the text
                line = repr(line)
            log.warning("%s (%s, %d so far): %s", verb, kind, self.counts[kind], line)
