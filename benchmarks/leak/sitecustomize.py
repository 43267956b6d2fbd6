"""Let a process reach its memory limit. Python imports this module in every process with this folder on PYTHONPATH.

The environment variable LEAK names a file. A thread waits until this file contains the id of the process. Then the
thread limits the address space of the process to the present size, and takes all memory that is still free in this
space. The process ends with an error, or continues without free memory.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

_FILE = Path(os.environ["LEAK"])
_SMALLEST = 64  # bytes of one allocation


def _leak() -> None:
    while not _FILE.exists() or _FILE.read_text() != str(os.getpid()):
        time.sleep(0.05)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now, now))
    kept, size = [], 1 << 20
    while True:
        try:
            kept.append(bytes(size))
        except MemoryError:
            size = max(_SMALLEST, size // 2)
            time.sleep(0.0001 * (size == _SMALLEST))


threading.Thread(target=_leak, daemon=True).start()
