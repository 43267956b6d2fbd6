"""Questions to the hosts of a Ray cluster."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError

ANSWER = 60.0
"""Seconds to wait for the answer of a host."""
LOST = RayError
"""Error of a call to a host: the host has died or does not answer, or the call failed."""


class Question:
    """A question to a host, which may never answer."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._end = time.monotonic() + ANSWER

    def settled(self, wait: float) -> bool:
        """Wait at most ``wait`` seconds for the answer.

        Return True if the answer has come, or if :data:`ANSWER` seconds have passed since the question.
        """
        left = max(0.0, self._end - time.monotonic())
        return bool(ray.wait([self._reference], timeout=min(wait, left))[0]) or wait >= left

    def answer(self) -> Any:
        """Return the answer. Raise RayError if the host has died or has not answered in time, or if the call failed."""
        return ray.get(self._reference, timeout=0)


def first_line(error: Exception) -> str:
    """Return the first line of an error. For an error from another host, return the first line of its cause."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[0].strip()[:200] if lines else type(cause).__name__
