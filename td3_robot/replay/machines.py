"""Compares this machine with the machine that made the recording.

If both machines and their package versions are alike, replayed numbers must equal the recorded numbers bit for bit.
Otherwise replay allows a tolerance, unless the user requires equal bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from td3_robot.util import machine

_HARDWARE = ("processor", "vector")
_SHOWN = 3  # maximum number of instruction sets in a text


def difference(metadata: Mapping[str, str], packages: Sequence[str]) -> str | None:
    """The first difference between the machine in ``metadata`` and this machine; None if they are alike.

    Args:
        metadata: metadata of a recording, or of the machine that made the reference outputs.
        packages: the packages whose versions matter.
    """
    here = machine.describe(packages)
    try:
        there: Any = json.loads(metadata["host"])
        pairs = [(key, str(there[key]), str(here[key])) for key in _HARDWARE]
        pairs += [(name, str(there["packages"][name]), str(here["packages"][name])) for name in packages]
    except (KeyError, TypeError, ValueError):
        return "the recording does not describe its machine"
    return next((_text(name, recorded, today) for name, recorded, today in pairs if recorded != today), None)


def _text(name: str, recorded: str, today: str) -> str:
    if name != "vector":
        return f"{name} was {recorded}, is {today}"
    before, now = set(recorded.split()), set(today.split())
    sides = (("lacks", before - now), ("has in addition", now - before))
    return "the processor " + " and ".join(f"{verb} {_some(sorted(sets))}" for verb, sets in sides if sets)


def _some(names: Sequence[str]) -> str:
    """Return the first instruction sets as text, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more instruction sets" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
