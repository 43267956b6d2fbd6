"""Gauges of a learner's run: time, recent returns and lengths, age of weights, and number of due updates."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

_RECENT = 20  # the mean return and the mean length cover at most this number of newest episodes
_REMEMBERED = 1000  # for this number of newest versions, Gauges remembers the number of updates at publication
_SMOOTHING = 0.01  # share of one Step in the moving mean ``staleness``


class Gauges:
    """Gauges of one run; they continue after a restart.

    Attributes:
        staleness: age of the weights that computed the actions: a moving mean, in updates.
        lead_min, lead_max: smallest and largest number of due updates (see :class:`RateLimiter`).
    """

    def __init__(self) -> None:
        self.staleness = 0.0
        self.lead_min = self.lead_max = 0.0
        self._returns: deque[float] = deque(maxlen=_RECENT)
        self._lengths: deque[int] = deque(maxlen=_RECENT)
        self._updates_at: dict[int, int] = {}
        self._wall_before = 0.0
        self._started: float | None = None

    def start(self, now: float) -> None:
        """Start the clock at the first call."""
        if self._started is None:
            self._started = now

    def wall(self, now: float) -> float:
        """Seconds of training, including the time before a restart."""
        return self._wall_before + (now - self._started if self._started is not None else 0.0)

    def published(self, version: int, updates: int) -> None:
        self._updates_at[version] = updates
        if len(self._updates_at) > _REMEMBERED:
            del self._updates_at[min(self._updates_at)]

    def acted(self, version: int, updates: int) -> None:
        """Record that weights of this version computed the action of an accepted Step."""
        if version in self._updates_at:
            self.staleness += _SMOOTHING * (updates - self._updates_at[version] - self.staleness)

    def ended(self, episodes: Iterable[tuple[float, int]]) -> None:
        for total, steps in episodes:
            self._returns.append(total)
            self._lengths.append(steps)

    @property
    def length_mean(self) -> float | None:
        """Mean number of steps of the newest whole episodes; None before the first whole episode."""
        return statistics.fmean(self._lengths) if self._lengths else None

    def lead(self, lead: float) -> None:
        self.lead_min, self.lead_max = min(self.lead_min, lead), max(self.lead_max, lead)

    def figures(self, now: float) -> dict[str, float]:
        """The gauges by name. ``return_mean`` is missing before the first whole episode."""
        figures = {"wall_s": self.wall(now), "staleness_updates": self.staleness}
        if self._returns:
            figures["return_mean"] = statistics.fmean(self._returns)
        return figures

    def state(self, now: float) -> dict[str, Any]:
        return {
            "wall_s": self.wall(now),
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "staleness": self.staleness,
            "lead": [self.lead_min, self.lead_max],
            "updates_at": sorted(self._updates_at.items()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a value that :meth:`state` has returned. The clock starts at the next :meth:`start`."""
        self._wall_before, self._started = float(state["wall_s"]), None
        self._returns = deque(state["returns"], _RECENT)
        self._lengths = deque(state.get("lengths", []), _RECENT)  # version 0.1.0 stored no lengths
        self.staleness = float(state["staleness"])
        self.lead_min, self.lead_max = map(float, state["lead"])
        self._updates_at = {int(version): int(updates) for version, updates in state["updates_at"]}
