"""Drops, redirects or catches output of simulated robots, from Python and C code."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress

_catching = threading.Lock()  # two threads that replace standard output at once would not restore it


@contextmanager
def _captured(descriptor: int, flush: Callable[[], object]) -> Iterator[list[bytes]]:
    """Catch what is written to a file descriptor inside the block.

    Yield a list, which gets the lines at the end of the block. If the descriptor is closed, or if no temporary file can
    be made, the list stays empty.

    Args:
        flush: empties the buffers of code that writes to the descriptor.
    """
    lines: list[bytes] = []
    flush()
    with ExitStack() as stack:
        file = None
        with suppress(OSError):
            real = os.dup(descriptor)
            stack.callback(os.close, real)
            file = stack.enter_context(tempfile.TemporaryFile())
        if file:
            os.dup2(file.fileno(), descriptor)
        try:
            yield lines
        finally:
            if file:
                flush()
                os.dup2(real, descriptor)
                file.seek(0)
                lines += file


@contextmanager
def without_lines(*beginnings: bytes) -> Iterator[None]:
    """Inside the block, drop the lines of standard error that start with one of ``beginnings``.

    C code writes to the file descriptor and not to ``sys.stderr``, so this function replaces the descriptor. The lines
    that are not dropped appear at the end of the block.
    """
    lines: list[bytes] = []
    try:
        with _captured(2, sys.stderr.flush) as lines:
            yield
    finally:
        rest = b"".join(line for line in lines if not line.startswith(beginnings))
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
    lines: list[bytes] = []
    with _catching:
        if sys.stdout:  # None if standard output is closed
            sys.stdout.flush()
        try:
            with _captured(1, lambda: library.fflush(None)) as lines:
                yield caught
        finally:
            if text := b"".join(lines):
                caught.append(text.decode(errors="replace"))
                with suppress(OSError):  # for example a pipe that nobody reads
                    os.write(1, text if text.endswith(b"\n") else text + b"\n")
