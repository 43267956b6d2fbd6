"""Writing files so that a crash at any instant leaves the old content or the new, never half of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write beside the target (readable by nobody else until it is there), flush to the disk, rename over it.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old file is untouched and nothing is left over.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
