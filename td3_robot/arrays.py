"""What the control loop asks of small arrays, in as little time as it can be asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def finite(array: NDArray[Any]) -> bool:
    """Whether all numbers of a float array are finite.

    The sum of squares is not finite if one number is not, and one call computes it; only where it overflows are the
    numbers looked at one by one.
    """
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())
