"""When a source goes on, and what it applies when no Action has come: at full speed, or by the clock.

Neither knows a clock: the time is told.
"""

from __future__ import annotations

import math

import numpy as np

from td3_robot.config.schema import PacingConfig
from td3_robot.messages import ActionOrigin
from td3_robot.specs import Float32, RobotSpec


class Fast:
    """As soon as everything waited for is there."""

    deadline: float | None = None

    def may_go_on(self, now: float, *, ready: bool) -> bool:
        """Whether to step now; ``ready`` says that the Action and the learner's leave are there."""
        del now
        return ready

    def stepped(self, now: float) -> int:
        """Take note of a step at ``now`` (s); how many deadlines have passed without one."""
        del now
        return 0

    def substitute(self, last: Float32) -> tuple[Float32, ActionOrigin]:
        """What to apply without an Action: here only ever before the first Step, when every robot is reset."""
        return last, ActionOrigin.NONE

    def figures(self) -> dict[str, float]:
        return {}


class RealTime:
    """At absolute deadlines, a control period apart from the first step on, whatever has come by then.

    A step that is late does not move the deadlines after it. One that is late by whole periods skips the deadlines it
    missed, and they are counted: catching up would give the policy no time to answer.

    Args:
        spec: the robot, for its control period and the limits of its actions.
        fallback: ``hold`` the last action of each robot, or ``zero``.

    Attributes:
        deadline: when to step next, in seconds; None before the first step.
        lag_max: the longest time (s) between a deadline and the step for it.
    """

    def __init__(self, spec: RobotSpec, fallback: str) -> None:
        self.deadline: float | None = None
        self.lag_max = 0.0
        self._period = spec.control_period
        self._origin = ActionOrigin.HELD if fallback == "hold" else ActionOrigin.ZERO
        self._low, self._high = spec.action_low, spec.action_high
        self._begin = 0.0
        self._periods = 0  # between the first step and the deadline
        self._steps = 0
        self._lag_sum = 0.0

    def may_go_on(self, now: float, *, ready: bool) -> bool:
        del ready
        return self.deadline is None or now >= self.deadline

    def stepped(self, now: float) -> int:
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
        # From the beginning, not from the deadline before: rounding would add up.
        self.deadline = self._begin + self._periods * self._period
        return missed

    def substitute(self, last: Float32) -> tuple[Float32, ActionOrigin]:
        """The fallback, float32[N, A], within the limits; ``last`` is what was applied before, 0 after a reset."""
        wanted = last if self._origin is ActionOrigin.HELD else np.zeros_like(last)
        return np.clip(wanted, self._low, self._high), self._origin

    def figures(self) -> dict[str, float]:
        """How late steps began, in seconds."""
        return {"lag_mean_s": self._lag_sum / max(1, self._steps), "lag_max_s": self.lag_max}


def make_pacing(config: PacingConfig, spec: RobotSpec) -> Fast | RealTime:
    """The pacing that a configuration asks for."""
    return RealTime(spec, config.fallback) if config.mode == "realtime" else Fast()
