"""Losses of the TD error δ = Q(s, a) - y, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Loss(NamedTuple):
    """A loss function and its derivative. Both map errors float32[B, 1] to float32[B, 1]."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _huber(error: Tensor) -> Tensor:
    """δ²/2 if |δ| ≤ 1, else |δ| - 1/2. With c = min(|δ|, 1), both cases are c (|δ| - c/2)."""
    size = error.abs()
    quadratic = size.clamp(max=1.0)
    return quadratic * (size - quadratic / 2)


LOSSES = {
    "mse": Loss(lambda error: error.square(), lambda error: 2 * error),
    "huber": Loss(_huber, lambda error: error.clamp(-1.0, 1.0)),
}
