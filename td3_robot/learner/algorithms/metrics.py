"""The metrics of an algorithm: means over updates, and newest values. The device computes the sums for the means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from td3_robot.util.text import one_line

Metrics = Mapping[str, Tensor | float]
"""The metrics of one update by name. Each metric is a number, or a tensor with one number on any device."""


def problem(metrics: object) -> str | None:
    """What is wrong with the metrics of an update; None if they are :data:`Metrics`."""
    if not isinstance(metrics, Mapping):
        return f"update returned {one_line(metrics)}; allowed: a map with the metrics by name"
    for name, value in metrics.items():
        size = value.numel() if isinstance(value, Tensor) else int(isinstance(value, (int, float)))
        if not isinstance(name, str) or size != 1:
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else one_line(value)
            return f"update returned the metric {name!r} with the value {found}; allowed: names with one number each"
    return None


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
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
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
