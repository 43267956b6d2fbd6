"""Keeps the replay ratio: critic updates made for each environment step, by saying which side has to wait.

The idea is Reverb's SampleToInsertRatio (Cassirer et al. 2021, section 3.3): a target, a start, and an error band.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RateLimiter:
    """``lead = ratio · (env_steps - start) - (updates - offline)`` is kept in [0, band] (in updates).

    The learner waits at 0: it never trains ahead of the data. The simulators wait at ``band``, and before that until
    the ``offline`` updates are made.

    Attributes:
        ratio: updates per environment step; None lets both run free.
        band: the most updates the learner may owe; at least those of one round of all robots and one
            more, or both sides would wait for each other; ``Config`` sees to that.
        start: environment steps before the first update.
        total: environment steps of the whole run.
        offline: updates before the first environment step, on what recordings hold.
    """

    ratio: float | None
    band: float
    start: int
    total: int
    offline: int = 0

    def lead(self, env_steps: int, updates: int) -> float:
        """Updates owed; negative before ``start``."""
        return (self.ratio or 0.0) * (env_steps - self.start) - (updates - self.offline)

    def updates_due(self, env_steps: int, updates: int) -> bool:
        """Whether one more update is owed (always, without a ratio, once learning has started)."""
        if updates < self.offline:
            return True
        if env_steps < max(1, self.start):
            return False
        return self.ratio is None or self.lead(env_steps, updates) >= 1

    def steps_allowed(self, updates: int, overshoot: int = 0) -> int:
        """Environment steps at which the simulators, all together, have to wait.

        ``overshoot`` is by how many steps they may pass it, because robots of one process step together; the wait
        then begins that much earlier (but never so early that no update would come due).
        """
        if updates < self.offline:
            return 0
        if self.ratio is None:
            return self.total
        room = max(self.band - self.ratio * overshoot, self.ratio + 1)
        return min(self.total, self.start + math.floor((updates - self.offline + room) / self.ratio))

    def done(self, env_steps: int, updates: int) -> bool:
        """Whether all steps are in and all updates they ask for are made."""
        return env_steps >= self.total and (self.ratio is None or not self.updates_due(env_steps, updates))
