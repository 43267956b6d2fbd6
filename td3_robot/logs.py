"""A node's log on standard error, written by a thread of its own.

To write there can take as long as it likes: a terminal that is stopped (Ctrl-S), a reader that reads no more, a network
below an ssh session that is gone. What keeps a robot's deadlines must not wait for that, so lines wait in a queue;
where it is full, they are counted and left out.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time

_WAITING = 1000  # lines
_PATIENCE = 1.0  # seconds that the end of a process waits for a reader


class Aside(logging.Handler):
    """Writes to a file descriptor without ever waiting for it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        # Not queue.Queue, whose lock a signal's handler that logs would wait for in vain.
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._put = self._written = self._lost = 0
        threading.Thread(target=self._write, daemon=True, name="log").start()

    def emit(self, record: logging.LogRecord) -> None:
        self.put(self.format(record))

    def put(self, line: str) -> None:
        """Have a line written when its turn comes."""
        self.acquire()
        try:
            if self._lines.qsize() >= _WAITING:
                self._lost += 1
                return
            if self._lost:
                line, self._lost = f"({self._lost} lines are left out: nobody read them)\n{line}", 0
            self._put += 1
            self._lines.put(f"{line}\n".encode("utf-8", "backslashreplace"))
        finally:
            self.release()

    def flush(self) -> None:
        """Wait until all is written, for a second at most."""
        end = time.monotonic() + _PATIENCE
        while self._written < self._put and time.monotonic() < end:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:  # full, or nobody is there any more: a robot goes on without its log
                pass
            finally:
                self._written += 1


_aside: Aside | None = None


def begin(name: str) -> None:
    """Log to standard error from now on, as ``name``; where logging is set up already, it stays as it is."""
    global _aside
    root = logging.getLogger()
    if root.handlers:
        return
    try:
        _aside = Aside(sys.stderr.fileno())
    except (AttributeError, OSError):  # it is closed, and what has its number now is something else
        root.addHandler(logging.NullHandler())
        return
    _aside.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    root.addHandler(_aside)
    root.setLevel(logging.INFO)


def last_words(line: str) -> None:
    """Say on standard error why this process ends, after all that was logged; waits a second for a reader at most."""
    if _aside:
        _aside.put(line)
        _aside.flush()
    elif sys.stderr:  # print would take standard output in its place
        print(line, file=sys.stderr)
