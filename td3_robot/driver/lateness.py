"""Warns if many Actions reach a driver too late."""

from __future__ import annotations

import logging

from td3_robot.util.rate import WINDOW_S

log = logging.getLogger(__name__)


class Lateness:
    """Compares the number of late Actions with the number of Steps, once every WINDOW_S seconds.

    An Action is late if it arrives after the control period of its Step. The driver does not apply it.

    Args:
        name: name of the driver.
        period: the control period in seconds.
        allowed: the share of late Actions per Step, from 0 to 1, above which the log gets a warning.
    """

    def __init__(self, name: str, period: float, allowed: float) -> None:
        self._name, self._period, self._allowed = name, period, allowed
        self._began: tuple[float, int, int] | None = None  # time (s), Steps and late Actions at the window's beginning

    def turn(self, now: float, steps: int, late: int) -> None:
        """Compare at ``now`` (s). ``steps`` and ``late`` are the numbers of Steps and late Actions since the start."""
        if self._began is None:
            self._began = now, steps, late
        began, steps_before, late_before = self._began
        if now - began < WINDOW_S:
            return
        self._began = now, steps, late
        new_steps, new_late = steps - steps_before, late - late_before
        if new_steps and min(1.0, new_late / new_steps) > self._allowed:  # no Steps: a long reset
            log.warning(
                "%s: in %.0f s, %d actions for %d Steps arrived after their control period of %g ms, so the robot did "
                "not get them; allowed: %.1f%% (realtime.missed_share)",
                *(self._name, now - began, new_late, new_steps, self._period * 1e3, self._allowed * 100),
            )
