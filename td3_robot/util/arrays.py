"""Fast checks of small arrays, for control loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEW = 32
"""Up to this many numbers, Python's sum is faster than numpy's."""


def finite(array: NDArray[Any]) -> bool:
    """Whether all numbers of a float array are finite.

    The sum of the numbers, or of their squares, is not finite if any number is not. The slow check of each number runs
    only if that sum overflows.
    """
    total = sum(array.ravel().tolist()) if array.size <= FEW else np.vdot(array, array)
    return math.isfinite(total) or bool(np.isfinite(array).all())
