"""Detects a hanging method of the robot. Then this module stops the robot from another thread and ends the process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from td3_robot.runtime import logs

Answer = TypeVar("Answer")

EXIT_HUNG = 70
"""Exit code of a driver after a hang (EX_SOFTWARE of sysexits.h)."""
# The thread gives up when five looks in a row find the same call: a first look, and _LOOKS more. The call has then
# lasted 1 to 1.25 times the limit.
_LOOKS = 4  # the thread looks this many times in ``limit`` seconds


class HangWatch:
    """A thread that watches the calls of the control loop.

    The thread counts its own looks and reads no clock. While the process is stopped or the machine sleeps, the thread
    makes no looks, so it does not give up on a call. After the thread gives up on a call, the calling thread never
    continues, even if the call returns. So no other call begins during or after ``stop``. Only the hanging call may
    still move the robot.

    Args:
        limit: seconds that a call may take.
        stop: brings the robot to rest. ``stop`` may hang, too, so a new thread calls it. None if the robot has no such
            method.
        end: ends the process with an exit code.
    """

    def __init__(self, limit: float, stop: Callable[[], None] | None, end: Callable[[int], object] = os._exit) -> None:
        self._limit, self._stop, self._end = limit, stop, end
        # The descriptor that stderr has now: a method of the robot may redirect stderr later.
        self._log = logs.descriptor()
        # The name of the running method. Each call makes a new list, so that ``_watch`` can distinguish two calls.
        self._call: list[str] | None = None
        self._lock = threading.Lock()
        self._given_up = False
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="hang").start()

    def run(self, what: str, call: Callable[[], Answer]) -> Answer:
        """Make a call that the thread watches. Return its result. ``what``: name of the method, for the log."""
        self._call = [what]
        try:
            return call()
        finally:
            with self._lock:
                self._call, given_up = None, self._given_up
            if given_up:
                self._ended.wait()

    def _watch(self) -> None:
        pause = threading.Event()
        seen, looks = None, 0
        while not self._given_up:
            pause.wait(self._limit / _LOOKS)
            with self._lock:
                call = self._call
                looks = looks + 1 if call is not None and call is seen else 0
                seen = call
                self._given_up = looks >= _LOOKS
        assert seen
        self._hung(seen[0])
        self._ended.set()

    def _hung(self, what: str) -> None:
        outcome = "the robot has no stop(), so the last action holds"
        if self._stop:
            outcomes = ["stop() did not return either"]
            thread = threading.Thread(target=self._try_stop, args=(self._stop, outcomes), daemon=True, name="stop")
            thread.start()
            thread.join(self._limit)
            outcome = outcomes[-1]
        # Do not use logging: the hanging thread may hold logging's lock. A write may hang, too, so a new thread writes.
        line = f"HUNG: {what}() has not returned for {self._limit * 1e3:.0f} ms; {outcome}; the driver ends\n"
        writer = threading.Thread(target=self._write, args=(line,), daemon=True, name="log")
        writer.start()
        writer.join(self._limit)
        self._end(EXIT_HUNG)

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            if self._log is not None:
                os.write(self._log, line.encode("utf-8", "replace"))

    @staticmethod
    def _try_stop(stop: Callable[[], None], outcomes: list[str]) -> None:
        try:
            stop()
        except Exception as error:  # code of the robot's author; the process ends anyway
            outcomes.append(f"stop() failed: {type(error).__name__}: {error}")
        else:
            outcomes.append("stop() was called")
