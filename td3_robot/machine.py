"""The machine that figures were measured on: a figure without it says nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_VECTOR = ("avx", "amx", "fma", "asimd", "sve")


def describe(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Processor, cores, load and versions, as plain JSON values; ``load`` is the 1-minute average before measuring.

    ``vector`` names the instruction sets that decide in which order matrix products are summed.
    """
    return {
        "processor": _processor(),
        "vector": _vector(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM now; None where there is no Linux to ask."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _vector() -> str:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return " ".join(sorted(flag for flag in flags if flag.startswith(_VECTOR)))


def _cpuinfo(key: str) -> str:
    """What Linux says of the first processor; empty where there is no Linux to ask."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
