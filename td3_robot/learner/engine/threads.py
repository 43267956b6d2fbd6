"""How an engine uses the threads of its process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import torch

from td3_robot.learner.compute import flush_denormals

ThreadsIn = Literal["critics", "operators"]
Result = TypeVar("Result")

_LARGE = 1 << 20  # elements; torch splits an operator of this size among its threads


def use_threads(threads: int, where: ThreadsIn = "critics") -> None:
    """Set how many threads torch has inside operators.

    With ``operators``, every operator uses all ``threads``. With ``critics``, the engine has two parallel threads, and
    the operators of each use half of ``threads``. Each of the two takes one critic, or half of the actor's batch.
    Threads inside an operator synchronise at every operator, which is slow on a busy machine. The two threads
    synchronise only seven times in two updates, but they also wait for Python's lock.

    Call this function before torch computes anything in this process. Torch creates its threads at the first large
    operator. They keep the treatment of denormal numbers that the creating thread has at that moment.
    """
    torch.set_num_threads(threads if where == "operators" else max(1, threads // 2))
    with flush_denormals():
        torch.zeros(_LARGE).add_(1.0)


class SecondThread:
    """A thread that computes in parallel with the caller's thread, without autograd."""

    def __init__(self) -> None:
        inner = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(inner,))

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Start ``work(*arguments)``."""
        return self._pool.submit(_in_second_thread, work, *arguments)


def second_thread(threads: int, where: ThreadsIn = "critics") -> SecondThread | None:
    """The second thread; None if the engine has only one."""
    return SecondThread() if threads >= 2 and where == "critics" else None


def _in_second_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    with torch.inference_mode(), flush_denormals():  # both settings belong to one thread
        return work(*arguments)
