"""The machine that figures were measured on: a figure without it says nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def describe(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Processor, cores, load and versions, as plain JSON values; ``load`` is the 1-minute average before measuring."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def resident_bytes(process: int | None = None) -> int | None:
    """Memory of a process (None: this one) that is in RAM now; None where there is no Linux to ask."""
    try:
        pages = int(Path(f"/proc/{process or 'self'}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")
