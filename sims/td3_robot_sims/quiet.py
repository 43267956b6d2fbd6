"""Drops, redirects or catches output of simulated robots, from Python and C code."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress

_catching = threading.Lock()  # two threads that replace standard output at once would not restore it


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


@contextmanager
def caught_stdout() -> Iterator[list[str]]:
    """Catch what C code writes to standard output inside the block.

    Yield a list. At the end of the block, it gets the caught text, and the text also goes to standard output. If
    standard output is closed, or if no temporary file can be made, the list stays empty.

    Only one thread at a time runs such a block. Start no process during the block: what the process writes after the
    block is lost.
    """
    library = ctypes.CDLL(None)
    caught: list[str] = []
    with _catching, ExitStack() as stack:
        if sys.stdout:  # None if standard output is closed
            sys.stdout.flush()
        library.fflush(None)
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            real = os.dup(1)
        except OSError:
            real = -1
        if real < 0:
            yield caught
        else:
            os.dup2(file.fileno(), 1)
            try:
                yield caught
            finally:
                library.fflush(None)
                os.dup2(real, 1)
                os.close(real)
                file.seek(0)
                if text := file.read():
                    caught.append(text.decode(errors="replace"))
                    with suppress(OSError):  # for example a pipe that nobody reads
                        os.write(1, text if text.endswith(b"\n") else text + b"\n")
