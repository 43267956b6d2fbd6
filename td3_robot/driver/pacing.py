"""Pacing in real time: decides when a source steps, and what it applies if no Action has arrived.

The class does not read a clock. Callers pass the time.
"""

from __future__ import annotations

import math

import numpy as np

from td3_robot.messages import ActionOrigin
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util.rate import LoopRate


class RealTime:
    """Schedules the steps of a source at absolute deadlines, one control period apart, even if no Action has arrived.

    A late step does not move later deadlines. If a step is late by one period or more, the source skips and counts the
    missed deadlines. If the source caught up instead, the policy would have no time to answer.

    Args:
        fallback: ``hold`` (each robot keeps its last action) or ``zero``.

    Attributes:
        deadline: time of the next step, in seconds; None before the first step.
        lag_max: the longest delay (s) of a step after its deadline.
        loop: the true rate of the steps.
    """

    def __init__(self, spec: RobotSpec, fallback: str) -> None:
        self.deadline: float | None = None
        self.lag_max = 0.0
        self.loop = LoopRate(spec.control_period)
        self._period = spec.control_period
        self._origin = ActionOrigin.HELD if fallback == "hold" else ActionOrigin.ZERO
        self._low, self._high = spec.action_low, spec.action_high
        self._begin = 0.0
        self._periods = 0  # control periods from the first step to the deadline
        self._steps = 0
        self._lag_sum = 0.0

    def may_step(self, now: float) -> bool:
        """Whether a step is due at ``now`` (s)."""
        return self.deadline is None or now >= self.deadline

    def stepped(self, now: float) -> int:
        """Register a step at ``now`` (s). Return how many deadlines passed without a step."""
        missed = 0
        if self.deadline is None:
            self._begin = now
        else:
            lag = now - self.deadline
            missed = math.floor(lag / self._period)
            self.lag_max = max(self.lag_max, lag)
            self._lag_sum += lag
            self._steps += 1
        self._periods += missed + 1
        self.loop.turn(now, missed=missed, deadlines=missed + 1)
        # Compute the deadline from the first step, so that rounding errors do not accumulate.
        self.deadline = self._begin + self._periods * self._period
        return missed

    def substitute(self, last: Float32) -> tuple[Float32, ActionOrigin]:
        """Return the fallback action within the limits. ``last``: the newest commanded action."""
        wanted = last if self._origin is ActionOrigin.HELD else np.zeros_like(last)
        return np.clip(wanted, self._low, self._high), self._origin

    def figures(self) -> dict[str, float]:
        """Return the mean and the longest delay (s) of steps after their deadlines, and the figures of ``loop``."""
        lags = {"lag_mean_s": self._lag_sum / max(1, self._steps), "lag_max_s": self.lag_max}
        return {**lags, **self.loop.figures}
