"""Checks what the code of an environment returns from a reset and a step. The user may have written this code.

Each check raises a :class:`NodeError` of one line: it names the task, the first field that is wrong, its value and what
is allowed. The error ends a training at once, because a restarted simulator would fail in the same way.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from td3_robot.errors import EXIT_USAGE, NodeError
from td3_robot.specs import Float32

STEP = ("observation", "reward", "terminated", "truncated")
"""The fields of a step, in this order."""
_FLOAT32 = np.dtype(np.float32)
_TYPES = (float, bool, bool)
_FLAGS = (True, False)


def ended(task: str, method: str, end: SystemExit) -> NodeError:
    """Return the error for a method that called ``sys.exit``."""
    return _error(task, f"{method}() called sys.exit({shown(end.code)}); it must return, or raise an exception")


def fields(task: str, method: str, result: Any, names: Sequence[str]) -> Sequence[Any]:
    """Return the result of a method. It must be a tuple or a list with one value for each of ``names``."""
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        return result
    returned = f"{len(result)} values" if isinstance(result, (tuple, list)) else shown(result)
    raise _error(task, f"{method}() returned {returned}; it must return {len(names)} values: {', '.join(names)}")


def observation(task: str, value: Any, shape: tuple[int, ...], method: str = "reset") -> Float32:
    """Convert an observation of ``method`` to a new array, float32[O]. ``shape`` is (O,)."""
    with contextlib.suppress(Exception):  # the user's value may be anything
        converted = np.array(value, np.float32)
        if converted.shape == shape:
            return converted
    if _converts(np.array, value, np.float32) and value is not None:  # numpy converts None to NaN
        raise _error(task, f"the observation of {method}() has shape {np.shape(value)}; it must be {shape}")
    raise _error(task, f"the observation of {method}() is {shown(value)}; it must be numbers of shape {shape}")


def outcome(task: str, values: Sequence[Any], shape: tuple[int, ...]) -> tuple[Float32, float, bool, bool]:
    """Convert the values of :data:`STEP`. The observation becomes a new array, float32[O]; ``shape`` is (O,)."""
    seen, reward, terminated, truncated = values
    if (  # true for the shipped robots, for which the conversion below would take 2 % of the time of a step
        seen.__class__ is np.ndarray
        and seen.dtype is _FLOAT32
        and seen.shape == shape
        and (reward.__class__, terminated.__class__, truncated.__class__) == _TYPES
    ):
        return seen.copy(), reward, terminated, truncated
    with contextlib.suppress(Exception):  # the user's values may be anything
        converted = np.array(seen, np.float32)
        if converted.shape == shape and np.ndim(reward) == 0 and terminated in _FLAGS and truncated in _FLAGS:
            return converted, float(reward), bool(terminated), bool(truncated)
    observation(task, seen, shape, "step")
    number(task, "field 'reward'", reward)
    name, flag = ("truncated", truncated) if _converts(_FLAGS.index, terminated) else ("terminated", terminated)
    raise _error(task, f"the field {name!r} of step() is {shown(flag)}; it must be True or False")


def reward_terms(task: str, info: Any) -> dict[str, float]:
    """Return the values of a Gymnasium environment's ``info`` whose names begin with ``reward_``."""
    if not isinstance(info, (dict, Mapping)):  # checking for a dict first is faster
        raise _error(task, f"the field 'info' of step() is {shown(info)}; it must be a map from names to values")
    terms = {}
    for name, value in info.items():
        if str(name).startswith("reward_") and not (_converts(np.ndim, value) and np.ndim(value)):
            terms[name] = number(task, f"field info[{name!r}]", value)
    return terms


def number(task: str, field: str, value: Any) -> float:
    """Convert a number of a step to float. ``field`` describes it in the error, for example ``field 'reward'``."""
    with contextlib.suppress(Exception):  # the user's value may be anything
        if np.ndim(value) == 0:
            return float(value)
    raise _error(task, f"the {field} of step() is {shown(value)}; it must be a number")


def shown(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return " ".join(reprlib.repr(value).split())


def _converts(convert: Callable[..., Any], *values: Any) -> bool:
    try:
        convert(*values)
    except Exception:  # the values come from the user's code, so their conversion may raise anything
        return False
    return True


def _error(task: str, text: str) -> NodeError:
    return NodeError(f"task {task!r}: {text}", EXIT_USAGE)
