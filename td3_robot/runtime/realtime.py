"""Real-time settings that a process asks of the operating system; a log line names each that is refused.

Apply them before the first socket exists: the threads of ZeroMQ inherit processors and priority.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from td3_robot.config.section import Natural, Section

_MCL_CURRENT, _MCL_FUTURE = 1, 2  # of mlockall(2)
HIGHEST_PRIORITY = 99  # of SCHED_FIFO
LONGEST_SPIN_US = 20_000


class RealtimeConfig(Section, frozen=True):
    """Real-time settings of the policy server; all are off by default.

    Attributes:
        processors: pin the server to these.
        priority: SCHED_FIFO priority, 1 to 99; 0 is the usual scheduler. Needs LimitRTPRIO under systemd. From 2 on,
            the thread that checks new weights runs at one less.
        lock_memory: keep the server's pages in RAM. Needs LimitMEMLOCK under systemd.
        freeze_gc: stop Python's cyclic garbage collector. The loop makes no cycles.
        spin_us: poll for so long (µs) after a message before the server sleeps, because a processor wakes slowly. If
            it is longer than the control period, the server keeps one processor busy. Excludes ``priority``: the
            driver would never get that processor.
    """

    processors: tuple[Natural, ...] = ()
    priority: Annotated[int, Meta(ge=0, le=HIGHEST_PRIORITY)] = 0
    lock_memory: bool = False
    freeze_gc: bool = False
    spin_us: Annotated[int, Meta(ge=0, le=LONGEST_SPIN_US)] = 0

    def __post_init__(self) -> None:
        if self.spin_us and self.priority:
            raise ValueError(
                f"realtime.spin_us is {self.spin_us} and realtime.priority is {self.priority}: a server that spins "
                "under SCHED_FIFO would block the driver; one of them must be 0"
            )

    @property
    def spin_s(self) -> float:
        return self.spin_us * 1e-6


@dataclass(frozen=True)
class Outcome:
    """Which settings were applied, and which were refused and why, as text for the log."""

    applied: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def apply(config: RealtimeConfig) -> Outcome:
    """Apply the settings one after the other; a refused one does not stop the rest."""
    outcome = Outcome()
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
    """Lower the priority of the calling thread by one, so that the control loop goes first.

    The thread stays above everything without real-time priority: while it holds the GIL, the loop waits for it.
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
    import ctypes  # imported lazily: it costs a megabyte

    library = ctypes.CDLL(None, use_errno=True)
    if library.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
