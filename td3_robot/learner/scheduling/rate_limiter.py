"""Keeps the replay ratio (updates per environment step) by making the learner or the simulators wait.

The method follows Reverb's SampleToInsertRatio (Cassirer et al. 2021, section 3.3), with a target ratio, a start and an
error band.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RateLimiter:
    """Keeps ``lead = ratio · (env_steps - start) - (updates - offline)`` between 0 and ``band`` updates.

    The lead is the number of updates that are due. The learner waits when the lead is below 1, so it never makes more
    updates than the ratio allows. The simulators wait when the lead reaches ``band``. At the start of the run, they
    also wait for the ``offline`` updates.
    """

    ratio: float | None  # updates per environment step; None for no limit
    band: float  # updates; ``Config`` refuses a band so small that learner and simulators wait for each other forever
    start: int  # environment steps before the first update
    total: int  # environment steps of the whole run
    offline: int = 0  # updates on recordings before the first environment step

    def lead(self, env_steps: int, updates: int) -> float:
        """The number of due updates; negative before ``start``."""
        return (self.ratio or 0.0) * (env_steps - self.start) - (updates - self.offline)

    def updates_due(self, env_steps: int, updates: int) -> bool:
        """Whether an update is due. Without a ratio: whether learning has started."""
        if updates < self.offline:
            return True
        if env_steps < max(1, self.start):
            return False
        return self.ratio is None or self.lead(env_steps, updates) >= 1

    def steps_allowed(self, updates: int, overshoot: int = 0) -> int:
        """The total number of environment steps at which the simulators must wait.

        When the simulators have made this number of steps, at least one update is due. The exception: after
        ``total`` steps, possibly no update is due.

        Args:
            overshoot: steps that the simulators can make beyond the limit, because all robots of one process make
                their steps at the same time. A larger overshoot lowers the limit.
        """
        if updates < self.offline:
            return 0
        if self.ratio is None:
            return self.total
        room = max(self.band - self.ratio * overshoot, self.ratio + 1)
        return min(self.total, self.start + math.floor((updates - self.offline + room) / self.ratio))

    def done(self, env_steps: int, updates: int) -> bool:
        """Whether the simulators have made all steps, and the learner has made all updates that are due."""
        return env_steps >= self.total and (self.ratio is None or not self.updates_due(env_steps, updates))
