"""Detects that training has diverged: a metric is not finite, or the critics' values are far larger than any return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.specs import Float32

_FACTOR = 100.0


class Divergence:
    """Checks the metrics of an algorithm.

    No return can exceed the limit r_max / (1 - γ), where r_max is the largest absolute reward so far. Without
    divergence, the critics' values can be several times this limit. With divergence, they grow by orders of magnitude
    within a few thousand updates. So the check accepts a mean |target| up to 100 times the limit. r_max is at least
    1. Otherwise, the limit would be 0 until the first reward other than 0. The check would then refuse the values of
    new networks. With γ = 1, the limit is infinite.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.greatest_reward = 1.0

    def add(self, rewards: Float32) -> None:
        """Record rewards float32[M]."""
        if len(rewards):
            self.greatest_reward = max(self.greatest_reward, float(abs(rewards).max()))

    @property
    def bound(self) -> float:
        """The largest allowed mean |target| of the critics."""
        return _FACTOR * self.greatest_reward / (1 - self.discount) if self.discount < 1 else math.inf

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        """Why these :meth:`Algorithm.metrics` show divergence; None if they do not."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                return f"{name} is {value}: networks hold numbers that are not finite"
        size = metrics.get("q_target_size", 0.0)
        if size > self.bound:
            return (
                f"the critics' values have exploded: q_target_size is {size:.3g}, above {self.bound:.3g}, which is "
                f"{_FACTOR:.0f} times the largest possible return with rewards up to {self.greatest_reward:.3g}"
            )
        return None

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        return {}, {"greatest_reward": self.greatest_reward}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        del arrays
        greatest = float(scalars["greatest_reward"])
        if not 1 <= greatest < math.inf:
            raise ValueError(f"the greatest reward is {greatest}; allowed: finite numbers of at least 1")
        self.greatest_reward = greatest
