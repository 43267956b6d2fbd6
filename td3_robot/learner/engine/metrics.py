"""Metrics of the engine: sums over many updates, and gauges. A gauge is a value of the newest update that computed it.

The sums stay on the device (CPU or GPU), so an update never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from td3_robot.learner.algorithms.metrics import RunningMetrics
from td3_robot.learner.algorithms.td3 import TD3

if TYPE_CHECKING:
    from td3_robot.learner.engine.td3 import FastTD3

_SATURATED = 0.99  # a normalised action is saturated if its absolute value is larger


class EngineMetrics(RunningMetrics):
    """The metrics of TD3. Their memory is fixed, so that a CUDA graph can write to it.

    Attributes:
        sums: float32[4], the sums over the updates after ``since``, in the order of ``TD3.means``.
        of_critics, of_actor: views of ``sums``, float32[3] and float32[1]; an update adds to them.
        since: number of updates at the newest :meth:`clear`.
        gauges: the gauges at the newest :meth:`read`, :meth:`state` or :meth:`restore`.
    """

    def __init__(self, engine: FastTD3) -> None:
        self.sums = torch.zeros(len(TD3.means), device=engine.device)
        self.of_critics, self.of_actor = self.sums[:-1], self.sums[-1:]
        self.since = 0
        self.gauges = dict.fromkeys(TD3.gauges, 0.0)
        self._engine = engine
        self._delay, self._critics_first = engine.config.policy_delay, engine.config.critics_first
        self._newest: dict[str, Tensor] = {}
        self._from = 0  # number of updates at the newest restore

    def keep(self, **values: Tensor) -> None:
        """Copy ``targets`` (y) or ``policy`` (π(s)) of the newest update into fixed memory."""
        for name, value in values.items():
            if name in self._newest and self._newest[name].shape == value.shape:
                self._newest[name].copy_(value)
            else:
                self._newest[name] = value.clone()

    def read(self) -> dict[str, float]:
        """The gauges, and the means over the updates after ``since``. Without such an update, the means are 0."""
        updates = self._engine.updates
        actor_updates = updates // self._delay - max(self.since, self._critics_first) // self._delay
        counts = [max(1, actor_updates if name == "actor_loss" else updates - self.since) for name in TD3.means]
        totals = self.sums.tolist()
        means = {name: total / count for name, total, count in zip(TD3.means, totals, counts, strict=True)}
        return means | self._read_gauges()

    def clear(self) -> None:
        self.sums.zero_()
        self.since = self._engine.updates

    def state(self) -> dict[str, Any]:
        """The scalars of the state; the algorithm saves ``sums``."""
        return {"sums_since": self.since, "gauges": self._read_gauges()}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        gauges = {name: float(scalars["gauges"][name]) for name in TD3.gauges}
        self.since, self.gauges, self._from = int(scalars["sums_since"]), gauges, int(scalars["updates"])

    def _read_gauges(self) -> dict[str, float]:
        """Each gauge from the newest update that computed it.

        After a restore, a gauge has its saved value until an update computes it.
        """
        updates = self._engine.updates
        policy_from = max(self._from, self._critics_first)
        if updates > self._from:
            self.gauges["q_target_size"] = float(self._newest["targets"].abs().mean())
            self.gauges["critic_gradient_norm"] = float(self._engine.critics_adam.gradient_norm())
        if updates // self._delay > policy_from // self._delay:
            saturated = self._newest["policy"].abs() > _SATURATED
            self.gauges["action_saturation"] = float(saturated.float().mean())
            self.gauges["actor_gradient_norm"] = float(self._engine.actor_adam.gradient_norm())
        return dict(self.gauges)
