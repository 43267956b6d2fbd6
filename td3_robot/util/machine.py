"""Facts about this machine: processor, memory, compiler, versions."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_GROUPS = Path("/sys/fs/cgroup")
_VECTOR = ("avx", "amx", "fma", "asimd", "sve")


def describe(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return processor, cores, load and versions, as plain JSON values.

    ``load`` is the average of the last minute. ``vector`` lists the instruction sets that affect the order of sums in
    matrix products.

    Args:
        packages: names of packages; the result includes their versions.
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


def version(package: str) -> str:
    """Return the installed version of a package; empty if it is not installed, or not by pip."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def available_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compiler() -> str:
    """Return the command of torch's C++ compiler. The environment variable ``CXX`` replaces the default."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def compiler_lack() -> str | None:
    """Return what this machine lacks to compile with torch; None if it lacks nothing."""
    if not shutil.which(compiler()):
        return f"there is no C++ compiler {compiler()!r} (CXX names another one)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"Python's headers are not here: {str(header)!r}"


def resident_bytes(process: int | None = None) -> int | None:
    """Return the bytes of RAM that a process uses now (None: this process); None on systems other than Linux."""
    try:
        pages = int(Path(f"/proc/{process or 'self'}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(process: int) -> float | None:
    """Return the processor time of a process in s, user plus system mode; None on systems other than Linux."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)


def available_memory() -> int | None:
    """Return the bytes that this process can allocate without swapping; None on systems other than Linux.

    The process has two kinds of limits: the available memory of the kernel, and the memory limits of its control
    groups, which containers set. The result is the smallest remainder. File caches count as free memory.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    known = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for line in own:
        number, controllers, path = line.split(":", 2)
        if number == "0":  # control groups version 2
            known += _group_rooms(_GROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            known += _group_rooms(_GROUPS / "memory", path, *names)
    return max(0, min(known)) if known else None


def _group_rooms(root: Path, path: str, limit: str, used: str, cached: str) -> list[int]:
    """Return the bytes left in a control group and in each parent group. A container sees only the root group."""
    rooms: list[int] = []
    place = root / path.lstrip("/")
    for group in [folder for folder in (place, *place.parents) if folder == root or root in folder.parents]:
        with contextlib.suppress(OSError, ValueError):  # there is no such group, or no limit ("max")
            most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
            rows = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            rooms.append(most - now + next((int(row[1]) for row in rows if row[0] == cached), 0))
    return rooms


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _vector() -> str:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return " ".join(sorted(flag for flag in flags if flag.startswith(_VECTOR)))


def _cpuinfo(key: str) -> str:
    """Return a value of the first processor; empty on systems other than Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
