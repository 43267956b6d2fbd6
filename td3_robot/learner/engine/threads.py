"""How an engine uses the threads of its process."""

from __future__ import annotations

from typing import Literal

import torch

from td3_robot.learner.compute import flush_denormals

ThreadsIn = Literal["critics", "operators"]

_LARGE = 1 << 20  # elements; torch splits an operator of this size among its threads


def use_threads(threads: int, where: ThreadsIn) -> None:
    """Set how many threads torch has inside an operator, that is, an operation on tensors.

    With ``operators``, every operator uses all ``threads``. With ``critics`` and 2 ``threads`` or more, the engine runs
    two main threads in parallel, and the operators of each main thread use half of ``threads``. Threads inside an
    operator synchronise at every operator, which is slow on a busy machine. The two main threads synchronise at most
    four times in an update. If the update is not compiled, each main thread also waits while the other main thread
    holds the Global Interpreter Lock.

    Call this function before torch computes anything in this process. Torch creates its threads at the first large
    operator. They keep the denormal setting that the calling thread has at that moment.
    """
    torch.set_num_threads(threads if where == "operators" else max(1, threads // 2))
    with flush_denormals():
        torch.zeros(_LARGE).add_(1.0)


def has_second_thread(threads: int, where: ThreadsIn) -> bool:
    """Whether a second thread of the engine computes in parallel with the caller's thread."""
    return threads >= 2 and where == "critics"


def prepare_thread(threads_in_operators: int) -> None:
    """Prepare the second thread. This function runs in the second thread."""
    torch.set_num_threads(threads_in_operators)
    torch.set_flush_denormal(True)
