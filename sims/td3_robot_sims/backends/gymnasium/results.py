"""Errors about the results of a Gymnasium environment: wrong fields of ``reset()`` and ``step()``."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from td3_robot.errors import NodeError

_FIELDS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}
"""The fields that a method of an environment returns, in this order."""


def wrong_result(task: str, method: str, result: Any, shape: tuple[int, ...]) -> NodeError:
    """Make an error of one line: it names the first field that is wrong, its value and what is allowed.

    Args:
        task: full name of the task.
        method: ``reset`` or ``step``.
        result: what the method returned. At least one field is wrong.
        shape: the shape that the observation must have.
    """
    return NodeError(f"task {task!r}: {_problem(method, result, shape)}")


def _problem(method: str, result: Any, shape: tuple[int, ...]) -> str:
    names = _FIELDS[method]
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        returned = f"{len(result)} values" if isinstance(result, (tuple, list)) else _shown(result)
        return f"{method}() returned {returned}; it must return {len(names)} values: {', '.join(names)}"
    observation, *middle, info = result
    if _fails(np.array, observation, np.float32):
        return f"the observation of {method}() is {_shown(observation)}; it must be numbers of shape {shape}"
    if np.shape(observation) != shape:
        return f"the observation of {method}() has shape {np.shape(observation)}; it must be {shape}"
    for name, value in zip(names[1:-1], middle, strict=True):
        kind, allowed = (float, "a number") if name == "reward" else (bool, "True or False")
        if _fails(kind, value):
            return f"the field {name!r} of {method}() is {_shown(value)}; it must be {allowed}"
    for name, value in info.items() if isinstance(info, Mapping) else ():
        if str(name).startswith("reward_") and _fails(lambda term: np.ndim(term) or float(term), value):
            return f"the field info[{name!r}] of {method}() is {_shown(value)}; it must be a number"
    return f"the field 'info' of {method}() is {_shown(info)}; it must be a map from names to values"


def _fails(convert: Callable[..., Any], *values: Any) -> bool:
    try:
        convert(*values)
    except Exception:  # the values come from the user's code, so their conversion may raise anything
        return True
    return False


def _shown(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return " ".join(reprlib.repr(value).split())
