"""The metrics of an algorithm: means over updates, and newest values. The device computes the sums for the means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Metrics = Mapping[str, Tensor]
"""The metrics of one update by name. Each metric is a tensor with one number."""


class RunningMetrics:
    """Adds up the metrics of updates. Only :meth:`read` and :meth:`state` wait for the device.

    Args:
        means: names of metrics. The class reports their means since :meth:`clear`, or 0 if they got no value.
        gauges: names of metrics. The class reports their newest values, or 0 before the first value. For metrics
            that are in neither list, it reports the means.
    """

    def __init__(self, means: tuple[str, ...], gauges: tuple[str, ...]) -> None:
        self._declared = dict.fromkeys(means, 0.0)
        self._gauges: dict[str, Tensor | float] = dict.fromkeys(gauges, 0.0)
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of one update."""
        for name, value in metrics.items():
            value = value.detach()
            if name in self._gauges:
                self._gauges[name] = value
            else:
                self._sums[name] = self._sums[name] + value if name in self._sums else value.float()
                self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> dict[str, float]:
        """The means since :meth:`clear`, and the gauges."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        return self._declared | means | {name: float(value) for name, value in self._gauges.items()}

    def clear(self) -> None:
        self._sums, self._counts = {}, {}

    def state(self) -> dict[str, Any]:
        sums = {name: [float(total), self._counts[name]] for name, total in self._sums.items()}
        return {"sums": sums, "gauges": {name: float(value) for name, value in self._gauges.items()}}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`. An error leaves the metrics unchanged."""
        sums = {name: torch.tensor(float(total)) for name, (total, _) in scalars["sums"].items()}
        counts = {name: int(count) for name, (_, count) in scalars["sums"].items()}
        saved = scalars["gauges"]
        self._gauges = {name: float(saved[name]) for name in self._gauges}
        self._sums, self._counts = sums, counts
