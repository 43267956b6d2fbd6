"""Whether training is still sound: numbers that are numbers, and values that rewards could ever add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from td3_robot.errors import BundleError
from td3_robot.specs import Float32

_FACTOR = 100.0


class Divergence:
    """Watches what a learner measures.

    No return can exceed r_max / (1 - γ), with r_max the greatest size of any reward so far. Sound critics overestimate,
    at times by several times that; ones that feed on their own error grow without end, by orders of magnitude within a
    few thousand updates. So the mean size of their targets may be a hundred times the bound, and not more. Rewards
    count as 1 at least, so that a task whose rewards are rare has room for what fresh networks say. With γ = 1 there is
    no bound.

    Args:
        discount: γ, 0 to 1.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.greatest_reward = 1.0

    def see(self, rewards: Float32) -> None:
        """Take in rewards float32[M]."""
        if len(rewards):
            self.greatest_reward = max(self.greatest_reward, float(abs(rewards).max()))

    @property
    def bound(self) -> float:
        """The greatest mean size of the critics' targets that is let pass."""
        return _FACTOR * self.greatest_reward / (1 - self.discount) if self.discount < 1 else math.inf

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        """What is wrong with these :meth:`Algorithm.metrics`; None if nothing."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                return f"{name} is {value}: networks hold numbers that are not finite"
        size = metrics.get("q_target_size", 0.0)
        if size > self.bound:
            return (
                f"the critics' values have exploded: q_target_size is {size:.3g}, above {self.bound:.3g}, which is "
                f"{_FACTOR:.0f} times the greatest return that rewards of {self.greatest_reward:.3g} can add up to"
            )
        return None

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """What goes on over a restart: no arrays, and scalars fit for JSON."""
        return {}, {"greatest_reward": self.greatest_reward}

    def restore(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`.

        Raises:
            BundleError: it does not hold a reward.
        """
        del arrays
        try:
            greatest = float(scalars["greatest_reward"])
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"state of the greatest reward: {type(error).__name__} {error}") from None
        if not 1 <= greatest < math.inf:
            raise BundleError(f"state of the greatest reward: {greatest}; at least 1 and finite belongs there")
        self.greatest_reward = greatest
