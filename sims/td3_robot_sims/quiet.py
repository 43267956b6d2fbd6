"""Drops or redirects output of simulated robots, from Python and C code."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


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


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error inside the block, for Python and C code.

    C code writes to the file descriptor and not to ``sys.stdout``, so this function also replaces the descriptor. C
    code keeps its output in a buffer, so this function empties the buffer before and after the block.
    """
    library = ctypes.CDLL(None)
    if sys.stdout:  # None if standard output is closed
        sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        library.fflush(None)
        try:
            real = os.dup(1)
        except OSError:  # standard output is closed
            yield
            return
        os.dup2(2, 1)
        try:
            yield
        finally:
            library.fflush(None)
            os.dup2(real, 1)
            os.close(real)
