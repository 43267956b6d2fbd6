"""Check saved environments, and store the state of a random generator as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import BundleError
from td3_robot.specs import Float32, RobotSpec

_MASK = 2**64 - 1


class SavedEpisode(NamedTuple):
    """A saved state after :func:`check`; see :meth:`td3_robot_sims.backends.base.Environment.save_state`."""

    random: NDArray[np.uint64]
    started: bool
    actions: Float32
    observation: Float32


def pack_random(generator: np.random.Generator) -> NDArray[np.uint64]:
    """The state of a PCG64 generator, uint64[6]: two 128-bit numbers, high half first, then the spare 32 bits."""
    state: Any = generator.bit_generator.state
    number, increment = int(state["state"]["state"]), int(state["state"]["inc"])
    words = [number >> 64, number & _MASK, increment >> 64, increment & _MASK, state["has_uint32"], state["uinteger"]]
    return np.array(words, np.uint64)


def unpack_random(words: NDArray[np.uint64], generator: np.random.Generator) -> None:
    """Put a state from :func:`pack_random` into ``generator``."""
    a, b, c, d, has_spare, spare = (int(word) for word in words)
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": a << 64 | b, "inc": c << 64 | d},
        "has_uint32": has_spare,
        "uinteger": spare,
    }


def check(state: Mapping[str, Any], spec: RobotSpec) -> SavedEpisode:
    """Check the types and shapes of a saved state.

    Raises:
        BundleError: a part is missing, or has another type or shape than ``spec`` needs.
    """
    where = f"saved state of {spec.name}"
    if not isinstance(state, Mapping) or set(state) != set(SavedEpisode._fields):
        raise BundleError(f"{where}: it must hold {', '.join(SavedEpisode._fields)}")
    random = array(state, "random", np.uint64, (6,), where)
    actions = array(state, "actions", np.float32, (None, spec.action_size), where)
    observation = array(state, "observation", np.float32, (spec.observation_size,), where)
    *_, increment, has_spare, spare = (int(word) for word in random)
    if increment % 2 == 0 or has_spare > 1 or spare >= 2**32:
        raise BundleError(f"{where}: random is not a state of a PCG64 generator")
    if not np.isfinite(actions).all():
        raise BundleError(f"{where}: an action is not finite")
    return SavedEpisode(random, bool(state["started"]), actions, observation)


def array(state: Mapping[str, Any], name: str, dtype: Any, shape: tuple[int | None, ...], where: str) -> NDArray[Any]:
    """One array of a saved state.

    Args:
        shape: None stands for any size.
        where: names the state in errors.

    Raises:
        BundleError: the array is missing, or has another type or shape.
    """
    found = state.get(name)
    if not isinstance(found, np.ndarray):
        raise BundleError(f"{where}: {name} is {type(found).__name__}; it must be an array")
    fits = found.ndim == len(shape) and all(b is None or a == b for a, b in zip(found.shape, shape, strict=True))
    if found.dtype != dtype or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise BundleError(f"{where}: {name} is {found.dtype}{list(found.shape)}; it must be {np.dtype(dtype)}[{sizes}]")
    return found
