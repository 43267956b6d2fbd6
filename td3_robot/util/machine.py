"""Facts about this machine: processor, memory, compiler, versions."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_GROUPS = Path("/sys/fs/cgroup")
_VECTOR = ("avx", "amx", "fma", "asimd", "sve")


def describe(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return this machine's processor, cores, load and system, and the versions of Python and ``packages``.

    All values are plain JSON. The value ``load`` is the result of :func:`load`. ``vector`` lists the instruction sets
    that affect the order of sums in matrix products.
    """
    flags = _features().split()
    return {
        "processor": _cpuinfo("model name") or platform.processor() or "unknown",
        "vector": " ".join(sorted(flag for flag in flags if flag.startswith(_VECTOR))),
        "cores": os.cpu_count(),
        "load": load(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def processor() -> str:
    """Return the name of the processor and all its features."""
    return f"{platform.machine()} {_cpuinfo('model name')} {_features()}"


def load() -> float:
    """Return the load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def version(package: str) -> str:
    """Return the installed version of a package; empty if the package or its metadata is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def available_cores() -> int:
    """Return the number of processor cores that this process can use. The number ignores the quota of a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compiler() -> list[str]:
    """Return the command of the C++ compiler. The environment variable ``CXX`` replaces the default.

    ``CXX`` may contain several words, for example ``ccache g++``.
    """
    return os.environ.get("CXX", "").split() or ["clang++" if sys.platform == "darwin" else "g++"]


def compiler_lack() -> str | None:
    """Return why the learner cannot compile its update; None if there is a C++ compiler."""
    program = compiler()[0]
    return None if shutil.which(program) else f"there is no C++ compiler {program!r} (to use another one, set CXX)"


def resident_bytes(process: int | None = None) -> int | None:
    """Return the bytes of RAM that a process uses now; None if it does not exist, or on systems other than Linux.

    Without ``process``, return the bytes of this process. An ended process still exists until its parent calls
    wait().
    """
    try:
        pages = int(Path(f"/proc/{process or 'self'}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(process: int) -> float | None:
    """Return the processor time of a process in s, in user and system mode.

    Return None if the process does not exist, or on systems other than Linux. An ended process still exists until its
    parent calls wait().
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)


def available_memory() -> int | None:
    """Return the bytes that this process can allocate without swapping; None on systems other than Linux.

    The result is the smallest of these: the bytes left on the machine, and the bytes left in each control group
    (container) of the process. These bytes include file caches that the system can free without swapping.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    left = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0":  # control groups version 2
            left += _left_in_groups(_GROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            left += _left_in_groups(_GROUPS / "memory", path, *names)
    return max(0, min(left)) if left else None


def _left_in_groups(root: Path, path: str, limit: str, used: str, cached: str) -> list[int]:
    """Return the bytes left in a control group and in each parent group. Leave out groups that have no limit.

    In a container, often only the folder of the root group exists. Then the result has at most one number.
    """
    left: list[int] = []
    place = root / path.lstrip("/")
    for group in [folder for folder in (place, *place.parents) if folder.is_relative_to(root)]:
        with contextlib.suppress(OSError, ValueError):  # there is no such group, or no limit ("max")
            most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
            rows = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            left.append(most - now + next((int(row[1]) for row in rows if row[0] == cached), 0))
    return left


def _features() -> str:
    """Return the features of the processor, for example its instruction sets; empty on systems other than Linux."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpuinfo(key: str) -> str:
    """Return the value of ``key`` for the first processor; an empty text if the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
