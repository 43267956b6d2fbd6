"""A node's log on standard error, written by a thread of its own.

To write there can take as long as it likes: a terminal that is stopped (Ctrl-S), a reader that reads no more, a network
below an ssh session that is gone. What keeps a robot's deadlines must not wait for that, so lines wait in a queue;
where it is full, they are counted and left out. The price: a process that dies at once (SIGSEGV, SIGKILL) takes the
lines of its last milliseconds along.
"""

from __future__ import annotations

import logging
import os
import queue
import select
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
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # threads stay behind

    def _begin(self) -> None:
        # Neither queue.Queue nor a Lock, for which a signal's handler that logs would wait in vain.
        self._counting = threading.RLock()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._put = self._written = self._lost = 0
        self._nobody_reads = False
        threading.Thread(target=self._write, daemon=True, name="log").start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a mistake in a call of the log is no reason to fail
            line = f"{record.name}: {type(error).__name__} in a line of {record.pathname}:{record.lineno}"
        self.put(line)

    def put(self, line: str, *, last: bool = False) -> None:
        """Have a line written when its turn comes; the ``last`` one whatever waits."""
        with self._counting:
            if self._lines.qsize() >= _WAITING and not last:
                self._lost += 1
                return
            if self._lost:
                line, self._lost = f"({self._lost} lines are left out: nobody read them)\n{line}", 0
            self._put += 1
            self._lines.put(f"{line}\n".encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Wait until all is written, for a second at most; and once that was in vain, not again."""
        end = time.monotonic() + _PATIENCE
        while self._written < self._put and not self._nobody_reads:
            time.sleep(0.001)
            self._nobody_reads = time.monotonic() > end

    def _write(self) -> None:
        torn = False
        while True:
            line = b"\n" * torn + self._lines.get()
            try:
                while line:
                    try:
                        line = line[os.write(self._descriptor, line) :]
                    except BlockingIOError:  # another program has made it so
                        select.select([], [self._descriptor], [], 1.0)
            except OSError:  # full, or nobody is there any more: a robot goes on without its log
                with self._counting:
                    self._lost += 1
            torn = bool(line)
            self._written += 1


_aside: Aside | None = None


def begin(name: str) -> None:
    """Log to standard error from now on, as ``name``; where logging is set up already, it stays as it is."""
    global _aside
    root = logging.getLogger()
    if root.handlers:
        return
    handler: logging.Handler = logging.StreamHandler() if _is_open() else logging.NullHandler()
    if (number := descriptor()) is not None:
        handler = _aside = Aside(number)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)  # which Python writes to standard error itself, and waits


def last_words(text: str) -> None:
    """Say on standard error why this process ends, after all that was logged; waits a second for a reader at most."""
    if _aside:
        _aside.put(text, last=True)
        _aside.flush()
    elif _is_open():  # print would take standard output in its place
        print(text, file=sys.stderr)


def descriptor() -> int | None:
    """Standard error's; None where it is closed, and something else may have its number, or where it is no file."""
    if not _is_open():
        return None
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # a program has put an object of its own there
        return None


def _is_open() -> bool:
    return sys.stderr is not None and not getattr(sys.stderr, "closed", False)
