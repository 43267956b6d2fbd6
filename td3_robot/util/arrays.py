"""What the control loop asks of small arrays, in as little time as it can be asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEW = 32
"""Numbers up to which Python adds them up sooner than numpy does."""


def finite(array: NDArray[Any]) -> bool:
    """Whether all numbers of a float array are finite.

    A sum is not finite if one number is not, and one call computes that of squares; only where it overflows are the
    numbers looked at one by one.
    """
    total = sum(array.ravel().tolist()) if array.size <= FEW else np.vdot(array, array)
    return math.isfinite(total) or bool(np.isfinite(array).all())
