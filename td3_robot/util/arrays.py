"""Fast checks of small arrays, for control loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEW = 32
"""For this many numbers or fewer, Python's ``sum`` is faster than ``np.vdot``."""


def finite(array: NDArray[Any]) -> bool:
    """Return whether all numbers of a float array are finite.

    If a number is not finite, the sum of the numbers (or of their squares) is not finite either. But a sum of finite
    numbers may overflow. So if the sum is not finite, the function checks each number, which is slower.
    """
    total = sum(array.ravel().tolist()) if array.size <= FEW else np.vdot(array, array)
    return math.isfinite(total) or bool(np.isfinite(array).all())
