"""Checks arguments of the Python API.

Each check returns the checked value. It raises TypeError for a wrong type, and ArgumentError for a value that is not
allowed. The error names the argument, its value and what is allowed.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from pathlib import Path
from typing import Any

from td3_robot.errors import ArgumentError
from td3_robot.util.text import one_line


def path(name: str, value: Any) -> Path:
    """Check an argument that names a file or a folder."""
    allowed = "the path of a file or folder, as text or pathlib.Path"
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str):
        raise wrong_type(name, value, allowed)
    if not found or "\0" in found:
        raise ArgumentError(name, f"is {found!r}; allowed: {allowed}")
    return Path(found)


def text(name: str, value: Any) -> str:
    """Check an argument that is text."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "text")
    return value


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Check an argument that is a whole number, from Python or numpy. The range includes ``least`` and ``most``."""
    allowed = f"whole numbers from {least}" + (f" to {most}" if most is not None else "")
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong_type(name, value, allowed) from None
    if number < least or (most is not None and number > most):
        raise ArgumentError(name, f"is {number}; allowed: {allowed}")
    return number


def seconds(name: str, value: Any) -> float:
    """Check an argument that is a finite time above 0, in s."""
    allowed = "finite numbers above 0, in s"
    if not isinstance(value, numbers.Real):
        raise wrong_type(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:  # a large int
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ArgumentError(name, f"is {number:g}; allowed: {allowed}")
    return number


def wrong_type(name: str, value: Any, allowed: str) -> TypeError:
    """Make the error for an argument of a wrong type."""
    return TypeError(f"{name} is {one_line(repr(value))}, of type {type(value).__name__}; allowed: {allowed}")
