"""A few threads that share out the turns of one function."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class ThreadPool:
    """``threads`` threads, the caller's own among them, that wait for work.

    Who does which turn is left to chance: turns must not depend on one another. A ``ThreadPoolExecutor`` took 0.1 ms
    more for each run, on a busy machine, and an interrupt ends the wait for it.
    """

    def __init__(self, threads: int) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The threads know the queue only, so that a pool nobody holds any more is collected, and they with it.
        self._helpers = [
            threading.Thread(target=_help, args=(self._work,), name=f"pool-{number}", daemon=True)
            for number in range(1, threads)
        ]
        self._end = weakref.finalize(self, _dismiss, self._work, len(self._helpers))
        for helper in self._helpers:
            helper.start()

    def run(self, turn: Callable[[int], None], count: int) -> None:
        """Call ``turn`` once with each number below ``count``; returns when all calls have.

        Raises:
            BaseException: an interrupt, or else what the turn with the lowest number among those that failed raised;
                all others are done.
        """
        numbers = iter(range(count))  # taking the next one of a range is one step of the interpreter
        failures: dict[int, BaseException] = {}
        begun: list[None] = []  # one for each helper
        ended: list[None] = []
        finished: SimpleQueue[None] = SimpleQueue()

        def work() -> None:
            for number in numbers:
                try:
                    turn(number)
                except BaseException as failure:  # an interrupt too is raised when the others have finished
                    failures[number] = failure

        def help_along() -> None:
            begun.append(None)
            work()
            ended.append(None)
            finished.put(None)

        interrupt: BaseException | None = None
        try:
            # Helpers are not there any more in a pool that was closed, or in a process that was forked.
            for _ in range(min(sum(helper.is_alive() for helper in self._helpers), count - 1)):
                self._work.put(help_along)
            work()
        except BaseException as raised:  # who caught it now would meet robots still stepped
            interrupt = raised
        while True:  # all of the wait is in the try: a signal's handler may raise at any step of the interpreter
            try:
                for _ in numbers:  # interrupted between two turns: a helper that has not begun finds none left
                    pass
                while len(ended) < len(begun):
                    finished.get()
                break
            except BaseException as raised:
                interrupt = raised
        if interrupt:
            raise interrupt
        if failures:
            stops = [number for number, failure in failures.items() if not isinstance(failure, Exception)]
            raise failures[min(stops or failures)]

    def close(self) -> None:
        """Send the threads home; a second call does nothing. Work that comes later is done by who asks for it."""
        self._end()
        for helper in self._helpers:
            helper.join()


def _help(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (share := work.get()) is not None:
        share()
        del share  # what was done is not to be kept alive while waiting


def _dismiss(work: SimpleQueue[Callable[[], None] | None], helpers: int) -> None:
    for _ in range(helpers):
        work.put(None)
