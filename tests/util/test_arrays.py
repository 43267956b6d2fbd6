"""The fast check that all numbers of an array are finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from td3_robot.util.arrays import FEW, finite


@pytest.mark.parametrize("size", [1, FEW, FEW + 1, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_finite_checks_every_number(size: int, dtype: Any) -> None:
    """The check finds a bad number at any position. It accepts finite numbers whose sum or squares overflow."""
    largest = np.finfo(dtype).max
    for value in (0.0, -1.5, largest, -largest):
        assert finite(np.full((1, size), value, dtype))
    for bad in (np.nan, np.inf, -np.inf):
        for place in {0, size // 2, size - 1}:
            array = np.full(size, 0.5, dtype)
            array[place] = bad
            assert not finite(array)
    opposite = np.array([np.inf, -np.inf] * size, dtype)
    assert not finite(opposite)
