"""A pool of threads that divide the calls of one function among themselves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class ThreadPool:
    """A pool of ``threads`` threads; the caller's thread is one of them.

    Calls run in any order. Python's ``ThreadPoolExecutor`` has two drawbacks. On a busy machine, each run takes 0.1 ms
    longer. After an interrupt, the executor stops waiting although calls still run.
    """

    def __init__(self, threads: int) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The threads refer to the queue, not to the pool. So Python can collect an unused pool, and its threads end.
        self._helpers = [
            threading.Thread(target=_serve, args=(self._work,), name=f"pool-{number}", daemon=True)
            for number in range(1, threads)
        ]
        self._end = weakref.finalize(self, _end, self._work, len(self._helpers))
        for helper in self._helpers:
            helper.start()

    def run(self, call: Callable[[int], None], count: int) -> None:
        """Call ``call`` once with each number below ``count``; return when all calls have ended.

        Raises:
            BaseException: ``call`` raised an exception, or an exception such as KeyboardInterrupt came while this
                method was not inside ``call`` (an interrupt). After an interrupt, no further call begins, and the
                method raises the exception of the interrupt. Without an interrupt, the method raises the exception of
                the failed call with the lowest number. A call that raised KeyboardInterrupt, or another exception that
                is not derived from Exception, has priority over other failed calls.
        """
        numbers = iter(range(count))  # next() is atomic
        failures: dict[int, BaseException] = {}
        begun: list[None] = []  # one entry for each helper that has begun
        ended: list[None] = []
        finished: SimpleQueue[None] = SimpleQueue()

        def work() -> None:
            for number in numbers:
                try:
                    call(number)
                except BaseException as failure:  # raised below, when all calls have ended
                    failures[number] = failure

        def help_caller() -> None:
            begun.append(None)
            work()
            ended.append(None)
            finished.put(None)

        interrupt: BaseException | None = None
        try:
            # A closed pool and a forked process have no living helpers.
            for _ in range(min(sum(helper.is_alive() for helper in self._helpers), count - 1)):
                self._work.put(help_caller)
            work()
        except BaseException as raised:  # helpers still run, so raise this exception after the wait
            interrupt = raised
        while True:  # the whole wait is inside the try, because a signal handler may raise at any point
            try:
                for _ in numbers:  # after an interrupt, use up the numbers, so that no further call begins
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
        """End the threads. Later runs use only the caller's thread."""
        self._end()
        for helper in self._helpers:
            helper.join()


def _serve(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := work.get()) is not None:
        task()
        del task  # do not keep the finished work alive while waiting


def _end(work: SimpleQueue[Callable[[], None] | None], helpers: int) -> None:
    for _ in range(helpers):
        work.put(None)
