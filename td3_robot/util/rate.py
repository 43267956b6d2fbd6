"""How fast counts grow."""

from __future__ import annotations


class RateMeter:
    """Growth of counts per second.

    Args:
        period: seconds that must pass before the rates change; calls in between repeat the newest ones.
        smoothing: seconds over which the rates are averaged; 0 for the growth since the last change.
    """

    def __init__(self, period: float = 0.0, smoothing: float = 0.0) -> None:
        self._period, self._smoothing = period, smoothing
        self._before: tuple[float, dict[str, float]] | None = None
        self._rates: dict[str, float] = {}

    def __call__(self, now: float, **counts: float) -> dict[str, float]:
        """The rates by the names of the counts; empty until time has passed since the first call.

        Args:
            now: in seconds.
            counts: since any fixed moment; the same names at every call.
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
