"""Compares this machine with the machine of a recording. Numbers must be equal to the bit only if both are alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from td3_robot.util import machine

_HARDWARE = ("processor", "vector")


def difference(metadata: Mapping[str, str], packages: Sequence[str]) -> str | None:
    """The first difference between the recorded machine and this one; None if they are alike.

    Args:
        metadata: metadata of a session or a reference.
        packages: the packages whose versions matter.
    """
    here = machine.describe(packages)
    try:
        there: Any = json.loads(metadata["host"])
        recorded, today = (
            {**{key: str(host[key]) for key in _HARDWARE}, **{name: str(host["packages"][name]) for name in packages}}
            for host in (there, here)
        )
    except (KeyError, TypeError, ValueError):
        return "the recording does not say on what machine it was made"
    for name, value in recorded.items():
        if today[name] != value:
            return f"{name} was {value}, is {today[name]}"
    return None
