"""What an operating system can do for a control loop, as far as it lets us: applied when permitted, said when not.

Apply it before the first socket is made: threads inherit processor and priority, those of ZeroMQ too.
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
    """What to ask of the operating system for the policy server; nothing by default.

    ``processors`` pins it to these; ``priority`` is SCHED_FIFO's, 1 to 99, 0 for the usual scheduler (systemd:
    LimitRTPRIO): from 2 on, the thread that looks at new weights has one less; ``lock_memory`` keeps its pages in RAM
    (LimitMEMLOCK); ``freeze_gc`` stops Python's collector of cycles, after taking what is alive out of its sight: the
    loop makes no cycles. ``spin_us`` is no matter of the operating system: for so long (µs) after a message the server
    looks for the next one instead of sleeping, out of which a processor wakes slowly. Longer than the control period,
    it keeps one processor busy for as long as the robot talks. Not together with ``priority``: nobody of lower priority
    would get that processor, the driver least of all.
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
                "under SCHED_FIFO keeps the processor from the driver; one of them must be 0"
            )

    @property
    def spin_s(self) -> float:
        return self.spin_us * 1e-6


@dataclass(frozen=True)
class Outcome:
    """What was done and what was not, as sentences for a log."""

    applied: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def apply(config: RealtimeConfig) -> Outcome:
    """Do what is asked for, one thing after the other; what is not permitted is told, and the rest done."""
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
    """Told by a thread that works beside a control loop: it lets the loop go first.

    It keeps to its processors, and stays above everything that asks for no real time: while it holds the interpreter,
    the loop waits for it.
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
    import ctypes  # here: a policy server that does not ask for it has a megabyte less

    library = ctypes.CDLL(None, use_errno=True)
    if library.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
