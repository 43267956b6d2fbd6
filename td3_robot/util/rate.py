"""Measures how fast counts grow."""

from __future__ import annotations


class RateMeter:
    """Measures the growth of counts per second.

    Args:
        period: seconds between two computations of the rates. Calls between them return the last rates.
        smoothing: seconds over which the rates are averaged; 0: only the last period counts.
    """

    def __init__(self, period: float = 0.0, smoothing: float = 0.0) -> None:
        self._period, self._smoothing = period, smoothing
        self._before: tuple[float, dict[str, float]] | None = None
        self._rates: dict[str, float] = {}

    def __call__(self, now: float, **counts: float) -> dict[str, float]:
        """Return the rate of each count, by the name of the count; empty until the first period is over.

        Args:
            now: time in seconds.
            counts: total counts. Every call must pass the same names.
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
