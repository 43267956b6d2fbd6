"""Measures how fast counts grow, and how regularly a loop runs."""

from __future__ import annotations

import logging
import math

WINDOW_S = 5.0
"""Duration of one measurement of a loop, in seconds."""


class RateMeter:
    """Measures by how much each count grows in one second.

    Args:
        period: seconds between two computations of the rates. Calls between them return the last rates.
        smoothing: seconds over which the rates are averaged; 0 to use only the last period.
    """

    def __init__(self, period: float = 0.0, smoothing: float = 0.0) -> None:
        self._period, self._smoothing = period, smoothing
        self._before: tuple[float, dict[str, float]] | None = None
        self._rates: dict[str, float] = {}

    def __call__(self, now: float, **counts: float) -> dict[str, float]:
        """Return a map from the name of each count to its rate. The map is empty until the first period is over.

        ``now`` is the current time in seconds. Every call must pass the same names.
        """
        if self._before is None:
            self._before = now, counts
        seconds = now - self._before[0]
        if seconds > 0 and seconds >= self._period:
            rates = {name: (count - self._before[1][name]) / seconds for name, count in counts.items()}
            if self._smoothing and any(self._rates.values()):
                weight = min(1.0, seconds / self._smoothing)
                rates = {name: old + weight * (rates[name] - old) for name, old in self._rates.items()}
            self._before, self._rates = (now, counts), rates
        return dict(self._rates)


class LoopRate:
    """Measures the true rate of a loop, its jitter and its missed deadlines, once every WINDOW_S seconds.

    Attributes:
        period: the intended time from one turn of the loop to the next, in seconds.
        figures: the newest measurement; empty before the first one. ``rate_hz``: turns per second. ``jitter_s``:
            standard deviation of the times between turns, in seconds. ``missed_share``: share of missed deadlines, from
            0 to 1.
        measured: time of the newest measurement, in seconds.
    """

    def __init__(self, period: float) -> None:
        self.period = period
        self.figures: dict[str, float] = {}
        self.measured = 0.0
        self._last: float | None = None
        self._reported = 0.0  # time of the newest measurement that `report` has seen
        self._begin()

    def _begin(self) -> None:
        self._turns = self._missed = self._deadlines = 0
        self._seconds = self._squares = 0.0  # sums of intervals (s) and of squared deviations from the period

    def turn(self, now: float, *, missed: int = 0, deadlines: int = 1) -> None:
        """Record that the loop made a turn at time ``now`` (s).

        ``deadlines`` is the number of deadlines since the last turn. ``missed`` is how many of them the loop missed.
        """
        last, self._last = self._last, now
        if last is None:
            return
        self._turns += 1
        self._seconds += now - last
        self._squares += (now - last - self.period) ** 2
        self._missed += missed
        self._deadlines += deadlines
        if self._seconds >= WINDOW_S:
            self._measure(now)

    def pause(self) -> None:
        """Do not measure the time between the last turn and the next turn."""
        self._last = None

    def report(self, log: logging.Logger, what: str, allowed: float) -> None:
        """Log the first measurement, and each later measurement in which the loop missed too many deadlines.

        ``what`` names the loop. If the share of missed deadlines is above ``allowed`` (0 to 1), the log entry is a
        warning.
        """
        if self._reported == self.measured:
            return
        first, self._reported = not self._reported, self.measured
        rate, jitter, missed = self.figures.values()
        if first or missed > allowed:
            log.log(
                logging.WARNING if missed > allowed else logging.INFO,
                "%s: %.4g of %.4g Hz, jitter %.2f ms; missed %.1f%% of the deadlines in %g s; "
                "allowed: %.1f%% (realtime.missed_share)",
                *(what, rate, 1 / self.period, jitter * 1e3, missed * 100, WINDOW_S, allowed * 100),
            )

    def _measure(self, now: float) -> None:
        late = self._seconds / self._turns - self.period  # mean deviation from the period
        self.figures = {
            "rate_hz": self._turns / self._seconds,
            "jitter_s": math.sqrt(max(0.0, self._squares / self._turns - late**2)),
            "missed_share": self._missed / self._deadlines,
        }
        self.measured = now
        self._begin()
