"""What TD3 says of its updates: means that add up on the device, and gauges of the newest update.

Nothing here waits for the device until it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from td3_robot.learner.networks import Adam

MEANS = ("critic_loss", "q_mean", "q_target_mean", "actor_loss")
GAUGES = ("q_target_size", "action_saturation", "critic_gradient_norm", "actor_gradient_norm")
_SATURATED = 0.99  # of half the action range


class TD3Metrics:
    """See :meth:`TD3.metrics` for what the names mean.

    Attributes:
        sums: float32[len(MEANS)], added up since the update ``since``.
        of_critics, of_actor: views of ``sums``, float32[3] and float32[1], to be added to after each update of theirs.
        gauges: as they were last computed.
    """

    def __init__(self, critics_adam: Adam, actor_adam: Adam, policy_delay: int, critics_first: int) -> None:
        self.sums = torch.zeros(len(MEANS), device=critics_adam.count.device)
        self.of_critics, self.of_actor = self.sums[:-1], self.sums[-1:]
        self.since = 0
        self.gauges = dict.fromkeys(GAUGES, 0.0)
        self._adams = {"critic_gradient_norm": critics_adam, "actor_gradient_norm": actor_adam}
        self._delay = policy_delay
        self._critics_first = critics_first
        self._newest: dict[str, Tensor] = {}
        self._from = 0

    def keep(self, **values: Tensor) -> None:
        """Hold on to ``targets`` (y) or ``policy`` (π(s)) of the newest update; both float32[B, …].

        In the same memory each time: where an update is captured, this is called once, and copied at each launch.
        """
        for name, value in values.items():
            if name in self._newest and self._newest[name].shape == value.shape:
                self._newest[name].copy_(value)
            else:
                self._newest[name] = value.clone()

    def means(self, updates: int) -> dict[str, float]:
        """Means of the updates since ``since`` up to ``updates``, 0 where there was none."""
        actor_updates = updates // self._delay - max(self.since, self._critics_first) // self._delay
        counts = [max(1, actor_updates if name == "actor_loss" else updates - self.since) for name in MEANS]
        return {name: total / count for name, total, count in zip(MEANS, self.sums.tolist(), counts, strict=True)}

    def read_gauges(self, updates: int) -> dict[str, float]:
        """The gauges of the newest of so many updates; those that a restored TD3 has not made anew stay as saved."""
        policy_from = max(self._from, self._critics_first)
        if updates > self._from:
            self.gauges["q_target_size"] = float(self._newest["targets"].abs().mean())
            self.gauges["critic_gradient_norm"] = float(self._adams["critic_gradient_norm"].gradient_norm())
        if updates // self._delay > policy_from // self._delay:
            saturated = self._newest["policy"].abs() > _SATURATED
            self.gauges["action_saturation"] = float(saturated.float().mean())
            self.gauges["actor_gradient_norm"] = float(self._adams["actor_gradient_norm"].gradient_norm())
        return dict(self.gauges)

    def clear(self, updates: int) -> None:
        """Begin new means after this update."""
        self.sums.zero_()
        self.since = updates

    def restore(self, since: int, gauges: Mapping[str, float], updates: int) -> None:
        """Go on from saved values, after so many updates; ``sums`` are restored by whoever saved them."""
        self.since, self.gauges, self._from = since, dict(gauges), updates
