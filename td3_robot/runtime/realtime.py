"""Applies real-time settings of the operating system to a process.

Apply them before the process opens its first socket, so that the threads of ZeroMQ inherit processors and priority.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import NamedTuple

from td3_robot.config.realtime import RealtimeConfig

_MCL_CURRENT, _MCL_FUTURE = 1, 2  # flags of mlockall(2)


class Outcome(NamedTuple):
    """The applied settings, and the refused settings with the reasons, as text for the log."""

    applied: list[str]
    refused: list[str]


def apply(config: RealtimeConfig) -> Outcome:
    """Apply all settings. If the operating system refuses a setting, continue with the next one."""
    outcome = Outcome([], [])
    if config.processors:
        names = ", ".join(map(str, config.processors))
        _try(outcome, f"on processors {names}", lambda: os.sched_setaffinity(0, config.processors))
    if config.lock_memory:
        _try(outcome, "memory locked", _lock_memory)
    if config.priority:
        parameters = os.sched_param(config.priority)
        _try(outcome, f"SCHED_FIFO {config.priority}", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, parameters))
    if config.freeze_gc:
        _try(outcome, "garbage collector frozen", _freeze)
    return outcome


def stand_back() -> None:
    """Lower the calling thread's SCHED_FIFO priority by one, so that the control loop runs first.

    If the thread has another scheduler or the lowest priority, 1, the function does nothing.
    The function does not change the scheduler. With the usual scheduler, another program could interrupt the thread
    while the thread holds the GIL. Then the control loop would wait for the GIL.
    """
    if os.sched_getscheduler(0) == os.SCHED_FIFO and (priority := os.sched_getparam(0).sched_priority) > 1:
        os.sched_setparam(0, os.sched_param(priority - 1))


def _try(outcome: Outcome, what: str, act: Callable[[], None]) -> None:
    try:
        act()
    except (OSError, ValueError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        outcome.refused.append(f"{what}: {reason}")
    else:
        outcome.applied.append(what)


def _lock_memory() -> None:
    import ctypes  # imported lazily, because it takes a megabyte of memory

    library = ctypes.CDLL(None, use_errno=True)
    if library.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
