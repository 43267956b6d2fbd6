"""Checks the arrays of a saved state, and stores the state of a random generator as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import BundleError

_MASK = 2**64 - 1


def pack_random(generator: np.random.Generator) -> NDArray[np.uint64]:
    """Return a PCG64 generator's state, uint64[6].

    The array contains the halves of two 128-bit numbers (high half first), a flag for spare bits, and 32 spare bits.
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
        raise BundleError("saved state: random is not a state of a PCG64 generator")
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": a << 64 | b, "inc": c << 64 | d},
        "has_uint32": has_spare,
        "uinteger": spare,
    }


def array(state: Mapping[str, Any], name: str, dtype: Any, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """Return one array of a saved state.

    Args:
        shape: the required shape; a first size of 0 allows any first size.
        where: name of the state in errors.

    Raises:
        BundleError: the array is missing, or has another type or shape.
    """
    found = state.get(name)
    if not isinstance(found, np.ndarray):
        raise BundleError(f"{where}: {name} is {type(found).__name__}; it must be an array")
    size = found.shape[:1] if shape[0] == 0 else shape[:1]
    if found.dtype != dtype or found.shape != size + shape[1:]:
        expected = f"{np.dtype(dtype)}{[*size, *shape[1:]]}"
        raise BundleError(f"{where}: {name} is {found.dtype}{list(found.shape)}; it must be {expected}")
    return found
