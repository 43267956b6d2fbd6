"""Checks the arrays of a saved state, and stores the state of a random generator as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import BundleError

_MASK = 2**64 - 1


def pack_random(generator: np.random.Generator) -> NDArray[np.uint64]:
    """Return the state of a PCG64 generator, uint64[6].

    Elements 0 to 3 hold two 128-bit numbers, the state and the increment, each as its high half and its low half. The
    generator can also keep 32 random bits for the next draw. Element 4 is 1 if it keeps such bits, else 0. Element 5
    holds the bits.
    """
    state: Any = generator.bit_generator.state
    number, increment = int(state["state"]["state"]), int(state["state"]["inc"])
    words = [number >> 64, number & _MASK, increment >> 64, increment & _MASK, state["has_uint32"], state["uinteger"]]
    return np.array(words, np.uint64)


def unpack_random(words: NDArray[np.uint64], generator: np.random.Generator) -> None:
    """Set ``generator`` to a state from :func:`pack_random`.

    Raises:
        BundleError: the numbers are not the state of a PCG64 generator.
    """
    a, b, c, d, has_spare, spare = (int(word) for word in words)
    if d % 2 == 0 or has_spare > 1 or spare >= 2**32:
        raise BundleError("saved state: 'random' is not a state of a PCG64 generator")
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": a << 64 | b, "inc": c << 64 | d},
        "has_uint32": has_spare,
        "uinteger": spare,
    }


def array(state: Mapping[str, Any], name: str, dtype: Any, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """Return one array of a saved state. In the text of an error, ``where`` names the state.

    Raises:
        BundleError: the array is missing, or has another type or shape.
    """
    found = state.get(name)
    what = f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
    expected = f"{np.dtype(dtype)}{list(shape)}"
    if what != expected:
        raise BundleError(f"{where}: {name!r} is {what}; it must be {expected}")
    return cast("NDArray[Any]", found)
