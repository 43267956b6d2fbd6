"""Notices that a method of the robot does not return, and does what can be done from outside: stop it, and end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from td3_robot.runtime import logs

Answer = TypeVar("Answer")

EXIT_HUNG = 70
"""Exit code of a driver one of whose methods did not return (EX_SOFTWARE of sysexits.h)."""
_LOOKS = 4  # in a limit: what is still there at the fifth has lasted for a limit, and for 1.25 at most


class _Call:
    """A method at work."""

    def __init__(self, what: str) -> None:
        self.what = what


class HangWatch:
    """Watches, from a thread of its own, over the calls of the thread that keeps the deadlines.

    Time is counted in the looks of this thread, not by a clock: a process that is stopped, or a machine that sleeps,
    stands still as a whole, and no method hangs for that. Once a method has been given up, the thread that called it
    goes no further, should it return after all: nobody tells the robot anything beside ``stop`` or after it.

    Args:
        limit: seconds a call may take.
        stop: brings the robot to rest, called from yet another thread; None: there is nothing that could.
        end: ends the process, told the exit code.
    """

    def __init__(self, limit: float, stop: Callable[[], None] | None, end: Callable[[int], object] = os._exit) -> None:
        self._limit, self._stop, self._end = limit, stop, end
        self._log = logs.descriptor()  # now: once it is closed, a bus of the robot's may have its number
        self._call: _Call | None = None
        self._lock = threading.Lock()
        self._given_up = False
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="hang").start()

    def over(self, what: str, call: Callable[[], Answer]) -> Answer:
        """What a call answers; while it lasts, it is watched over."""
        self._call = _Call(what)
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
        self._hung(seen.what)
        self._ended.set()

    def _hung(self, what: str) -> None:
        told = "the robot has no stop() of its own, so what it was told last holds"
        if self._stop:
            outcome = ["stop() did not return either"]
            thread = threading.Thread(target=self._try_stop, args=(self._stop, outcome), daemon=True, name="stop")
            thread.start()
            thread.join(self._limit)
            told = outcome[-1]
        # Not through logging: the thread that hangs may hold its lock. And to write can hang, too.
        line = f"HUNG: {what}() has not returned for {self._limit * 1e3:.0f} ms; {told}; the driver ends\n"
        words = threading.Thread(target=self._say, args=(line,), daemon=True, name="words")
        words.start()
        words.join(self._limit)
        self._end(EXIT_HUNG)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            if self._log is not None:
                os.write(self._log, line.encode("utf-8", "replace"))

    @staticmethod
    def _try_stop(stop: Callable[[], None], outcome: list[str]) -> None:
        try:
            stop()
        except Exception as error:  # another author's code; whatever it says, the process ends
            outcome.append(f"stop() failed: {type(error).__name__}: {error}")
        else:
            outcome.append("stop() was called")
