"""Keeps known output of C libraries off the terminal."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines(*beginnings: bytes) -> Iterator[None]:
    """Inside the block, drop the lines of standard error that start with one of ``beginnings``.

    C code writes to the file descriptor and not to ``sys.stderr``, so this function replaces the descriptor. The lines
    that are not dropped appear at the end of the block.
    """
    sys.stderr.flush()
    try:
        real = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            caught.seek(0)
            rest = b"".join(line for line in caught if not line.startswith(beginnings))
            if rest:
                os.write(2, rest)
