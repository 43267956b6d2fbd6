"""Writes log lines to standard error, and never delays the node.

Writing to standard error can block, for example if Ctrl-S stops a terminal, a reader stops reading, or an ssh
connection breaks. A control loop must not wait for a blocked write. So the node puts lines into a bounded queue, and a
thread writes them. If the queue is full, the node drops lines and counts them. If SIGSEGV or SIGKILL ends the process,
the lines of the last milliseconds are lost.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from typing import Any

_MOST_WAITING = 1000  # lines
_FLUSH_TIMEOUT = 1.0  # seconds


class _Writer(QueueListener):
    """The thread that writes queued lines to a file descriptor. ``failed`` counts the lines that it lost."""

    def __init__(self, lines: queue.SimpleQueue[Any], descriptor: int) -> None:
        super().__init__(lines)
        self._descriptor = descriptor
        self._torn = False  # the last line was not written completely
        self.written = self.failed = 0

    def handle(self, record: logging.LogRecord) -> None:
        line = whole = b"\n" * self._torn + f"{record.msg}\n".encode("utf-8", "backslashreplace")
        try:
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:  # another program made standard error non-blocking
                    select.select([], [self._descriptor], [], 1.0)
        except OSError:  # the disk is full, or the reader has ended: the robot continues without a log
            self.failed += record.__dict__["lost"]
        if line is not whole:
            self._torn = bool(line)
        self.written += 1


class LogQueue(QueueHandler):
    """Queues lines for a file descriptor. Queueing never waits for the file."""

    queue: queue.SimpleQueue[Any]  # queue.Queue would deadlock if a signal handler logs

    def __init__(self, descriptor: int) -> None:
        super().__init__(queue.SimpleQueue())
        self._descriptor = descriptor
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # a fork does not copy the writer's thread

    def _begin(self) -> None:
        self.queue = queue.SimpleQueue()
        self._queued = self._dropped = self._reported = 0
        self._nobody_reads = False
        self._writer = _Writer(self.queue, self._descriptor)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format a record. An error in a log call must not end the node."""
        try:
            return _line(self.format(record))
        except Exception as error:
            return _line(f"{record.name}: {type(error).__name__} in the log call at {record.pathname}:{record.lineno}")

    def enqueue(self, record: logging.LogRecord, *, always: bool = False) -> None:
        """Queue a line. If the queue is full and ``always`` is not set, drop the line and count it."""
        if self.queue.qsize() >= _MOST_WAITING and not always:
            self._dropped += 1
            return
        lost = self._dropped + self._writer.failed
        if lost > self._reported:
            missing = lost - self._reported
            self._put(_line(f"({missing} lines are missing: they could not be written)", missing))
            self._reported = lost
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        self._queued += 1
        self.queue.put(record)

    def write_last(self, text: str) -> None:
        """Write a last line after all other lines. Wait up to one second until it is written."""
        self.acquire()
        try:
            self.enqueue(_line(text), always=True)
        finally:
            self.release()
        self.flush()

    def flush(self) -> None:
        """Wait up to one second until all lines are written. After one timeout, never wait again."""
        end = time.monotonic() + _FLUSH_TIMEOUT
        while self._writer.written < self._queued and not self._nobody_reads:
            time.sleep(0.001)
            self._nobody_reads = time.monotonic() > end


def _line(text: str, lost: int = 1) -> logging.LogRecord:
    """Return a record with this text. ``lost`` is the number of lines that are lost if the record cannot be written."""
    return logging.makeLogRecord({"msg": text, "lost": lost})


_queue: LogQueue | None = None


def begin(name: str) -> None:
    """Log to standard error under ``name``. If the root logger already has handlers, change nothing."""
    global _queue
    root = logging.getLogger()
    if root.handlers:
        return
    handler: logging.Handler = logging.StreamHandler() if _is_open() else logging.NullHandler()
    if (number := descriptor()) is not None:
        handler = _queue = LogQueue(number)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)  # otherwise Python writes warnings to standard error itself, which can block


def last_words(text: str) -> None:
    """Write the reason why this process ends, after all log lines. Wait up to one second until it is written."""
    if _queue:
        _queue.write_last(text)
    elif _is_open():  # print writes to standard output if sys.stderr is None
        print(text, file=sys.stderr)


def descriptor() -> int | None:
    """Return the file descriptor of standard error; None if it is closed or not a file.

    A closed standard error has no descriptor: its old number may belong to another file now.
    """
    if not _is_open():
        return None
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # a program has replaced sys.stderr by an object without a file
        return None


def _is_open() -> bool:
    return sys.stderr is not None and not getattr(sys.stderr, "closed", False)
