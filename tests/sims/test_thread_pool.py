"""A thread pool makes each call once, raises failures, and leaves no thread behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from td3_robot_sims.thread_pool import ThreadPool


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(4)
    yield pool
    pool.close()


def alive(helpers: list[threading.Thread]) -> int:
    return sum(helper.is_alive() for helper in helpers)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 100])
def test_run_makes_each_call_once_and_returns_when_all_calls_have_ended(threads: int, count: int) -> None:
    pool = ThreadPool(threads)
    for _ in range(20):
        taken: list[int] = []
        pool.run(taken.append, count)
        assert sorted(taken) == list(range(count))
    pool.close()


def test_calls_run_at_the_same_time(pool: ThreadPool) -> None:
    """Four calls that wait for each other need four threads. The barrier times out after a minute."""
    barrier = threading.Barrier(4)
    pool.run(lambda _: barrier.wait(60), 4)
    assert not barrier.broken


def test_a_pool_of_one_thread_makes_all_calls_in_the_caller() -> None:
    pool, seen = ThreadPool(1), set()
    pool.run(lambda _: seen.add(threading.current_thread()), 5)
    assert seen == {threading.current_thread()}
    assert not pool._helpers
    pool.close()


def test_run_waits_for_all_calls_then_raises_the_failure_of_call_3_if_calls_3_and_5_fail(pool: ThreadPool) -> None:
    taken: list[int] = []

    def call(number: int) -> None:
        taken.append(number)
        if number in (3, 5):
            raise ValueError(f"call {number}")

    for _ in range(50):
        taken.clear()
        with pytest.raises(ValueError, match="call 3"):
            pool.run(call, 8)
        assert sorted(taken) == list(range(8))


def test_run_waits_for_all_calls_then_raises_the_interrupt_of_a_call(pool: ThreadPool) -> None:
    barrier, done = threading.Barrier(2), []

    def call(number: int) -> None:
        barrier.wait(60)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        pool.run(call, 2)
    assert len(done) == 1


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_an_exception_that_interrupts_the_wait_for_helpers_is_raised_after_all_calls(
    pool: ThreadPool, raised: type[BaseException]
) -> None:
    main = threading.main_thread()
    helped, interrupted, left = threading.Event(), threading.Event(), threading.Event()
    early: list[bool] = []

    def press(_number: int, _frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise raised

    def call(_: int) -> None:
        if threading.current_thread() is main:
            assert helped.wait(60)
            return
        helped.set()
        while sys._current_frames()[main.ident or 0].f_code is not ThreadPool.run.__code__:
            pass  # until the caller waits
        os.kill(os.getpid(), signal.SIGINT)
        # A signal that comes just before the caller sleeps does not wake the caller. So repeat the signal.
        while not interrupted.wait(1):
            os.kill(os.getpid(), signal.SIGINT)
        early.append(left.wait(0.2))

    before = signal.signal(signal.SIGINT, press)
    try:
        with pytest.raises(raised):
            pool.run(call, 2)
        left.set()
    finally:
        signal.signal(signal.SIGINT, before)
    assert early == [False], "run() raised while a call was running"


def test_an_interrupt_has_priority_over_other_failures(pool: ThreadPool) -> None:
    def call(number: int) -> None:
        raise KeyboardInterrupt if number == 5 else ValueError(number)

    with pytest.raises(KeyboardInterrupt):
        pool.run(call, 8)


def test_in_a_forked_process_the_caller_does_the_work() -> None:
    code = """
import os, warnings
from td3_robot_sims.thread_pool import ThreadPool
warnings.simplefilter("ignore")
pool, taken = ThreadPool(3), []
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
pool.run(taken.append, 4)
os._exit(0 if taken == [0, 1, 2, 3] else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=170).returncode == 0


def test_close_and_the_garbage_collector_end_the_threads() -> None:
    pool, forgotten = ThreadPool(3), ThreadPool(3)
    threads = forgotten._helpers
    assert (alive(pool._helpers), alive(threads)) == (2, 2)
    pool.close()
    pool.close()
    assert (alive(pool._helpers), alive(threads)) == (0, 2)
    del forgotten
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert alive(threads) == 0


def test_a_closed_pool_leaves_the_work_to_the_caller(pool: ThreadPool) -> None:
    pool.close()
    taken: list[int] = []
    pool.run(taken.append, 3)
    assert taken == [0, 1, 2]
