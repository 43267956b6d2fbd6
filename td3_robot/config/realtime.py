"""The configuration section ``realtime``: settings for the loops of the policy server and the driver."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from td3_robot.config.section import Fraction, Natural, Section


class RealtimeConfig(Section, frozen=True):
    """Real-time settings of the policy server. Only ``missed_share`` also holds for drivers.

    All settings except ``missed_share`` are off by default.

    Attributes:
        processors: numbers of the processors that the server may run on.
        priority: SCHED_FIFO priority, 1 to 99; 0 selects the usual scheduler. Under systemd, a priority above 0 needs
            LimitRTPRIO. If the priority is at least 2, the thread that checks new weights gets the priority minus one.
        lock_memory: keep the server's memory pages in RAM. Under systemd, this needs LimitMEMLOCK.
        freeze_gc: stop Python's cyclic garbage collector. The server's loop makes no reference cycles, so it needs no
            collector.
        spin_us: after a message, the server polls for this time in µs before it sleeps, because a sleeping processor
            reacts slowly. If the time is longer than the control period, the server keeps one processor busy. This
            key cannot be combined with ``priority``, because the server would block the driver.
        missed_share: the policy server and the driver log a warning if they miss more than this share of their
            deadlines in 5 s. A driver also warns if it gets late Actions for more than this share of its Steps. With 1,
            they never warn.
    """

    processors: tuple[Natural, ...] = ()
    priority: Annotated[int, Meta(ge=0, le=99)] = 0
    lock_memory: bool = False
    freeze_gc: bool = False
    spin_us: Annotated[int, Meta(ge=0, le=20_000)] = 0
    missed_share: Fraction = 0.05

    def __post_init__(self) -> None:
        if self.spin_us and self.priority:
            raise ValueError(
                f"realtime.spin_us is {self.spin_us} and realtime.priority is {self.priority}: a server that spins "
                "under SCHED_FIFO would block the driver; set spin_us or priority to 0"
            )

    @property
    def spin_s(self) -> float:
        return self.spin_us * 1e-6
