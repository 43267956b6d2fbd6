"""The robot's own safety. A state, a watchdog, limits and the safe action stand between Actions and the robot.

These parts protect the robot even if the policy server fails or sends wrong actions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from td3_robot.messages import Action, Command
from td3_robot.safety.commands import Verbs
from td3_robot.safety.lifecycle import Lifecycle, State, Watchdog
from td3_robot.safety.limits import SafetyConfig, joined
from td3_robot.specs import Float32, RobotSpec


class Guard:
    """Guards the robots of one source.

    The first Action after the start or an ``activate`` arms the watchdog. The watchdog stays armed in later episodes.
    After the start, after an ``activate``, and at the beginning of an episode, the source waits for the next Action. If
    ``safety.action_deadline_ms`` is set, the source applies the safe action during this wait. Otherwise
    :mod:`td3_robot.driver.pacing` chooses the action: the last action, or zero. The limits of the specification hold
    even if the settings have none.

    ``autostart`` takes the robot to the state ``active`` at the first :meth:`look`. Raises ConfigError if the settings
    do not fit the robot.
    """

    def __init__(self, spec: RobotSpec, name: str, config: SafetyConfig | None = None, *, autostart: bool = True):
        self.envelope = joined(config or SafetyConfig(), SafetyConfig(), spec)
        self.lifecycle = Lifecycle(name)
        self.counters: Counter[str] = Counter()
        self._spec = spec
        self._autostart = autostart
        self._waiting = True  # for an Action: after the start, after an activate, and at the beginning of an episode
        self._begun = False
        self._watchdog = Watchdog(self.lifecycle, "action", self.envelope.action_deadline_s, self.envelope.recovery_s)
        moves = ("configure", "activate", "deactivate", "reset", "estop", "shutdown")
        self.verbs: Verbs = {"state": lambda *_: None, **dict.fromkeys(moves, self._move)}

    @property
    def due(self) -> float | None:
        """The time (s) of the next necessary :meth:`look`; None while no deadline is running."""
        return -math.inf if self._begun else self._watchdog.due

    @property
    def finished(self) -> bool:
        return self.lifecycle.state is State.FINALIZED

    @property
    def safe(self) -> bool:
        """Whether the source must apply the safe action, even if Actions come."""
        waiting = self.envelope.action_deadline_s is not None and self._waiting
        return not self.lifecycle.active or waiting

    def look(self, now: float) -> None:
        """Compare the time with the deadline. The first call also activates the robot if ``autostart`` is set."""
        if self._autostart:
            self._autostart = False
            self.lifecycle.command("configure", now, "the robot is there")
            self.lifecycle.command("activate", now, "autostart")
        if self._begun:
            self._begun = False
            self._watchdog.put_off(now)
        self._watchdog.check(now)

    def accept(self, action: Action, now: float) -> Float32 | None:
        """Return the action to apply, float32[N, A] within the limits; None if the robot must not apply this Action.

        If a channel has ``out_of_limit: stop``, and an action of a policy or an operator exceeds a limit of this
        channel, the guard stops the robot.
        """
        self._watchdog.feed(now)
        self._waiting = False
        if not self.lifecycle.active:
            self.counters["actions_ignored"] += 1
            return None
        violation = None if action.safe else self.envelope.violation(action.action, self._spec.actions)
        if violation:
            self.lifecycle.stop(violation, now)
            return None
        wanted, low, high = action.action, self.envelope.low, self.envelope.high
        if (low <= wanted).all() and (wanted <= high).all():
            return wanted
        self.counters["actions_clipped"] += 1
        return np.clip(wanted, low, high)

    def trouble(self, reason: str, now: float) -> None:
        """Go to FAULT, because the robot reports a problem. While the problem lasts, Actions do not end FAULT."""
        self._watchdog.interrupt()
        self.lifecycle.fault(reason, now)

    def refuses_reset(self, seconds: float, now: float) -> bool:
        """Return whether a reset that has lasted for ``seconds`` must end. If so, go to FAULT.

        Without ``safety.action_deadline_ms``, a reset may last for any time.
        """
        limit = self.envelope.reset_timeout_s
        refuses = self.envelope.action_deadline_s is not None and seconds > limit
        if refuses:
            self.trouble(f"the reset has lasted longer than {limit * 1e3:g} ms", now)
        return refuses

    def begin(self) -> None:
        """Begin an episode. If the watchdog is armed, the deadline of the first Action starts at the next :meth:`look`.

        The deadline does not start now, because the caller read its clock before the reset, and a reset may take long.
        """
        self._waiting = True
        self._begun = self._watchdog.due is not None

    def detail(self) -> Mapping[str, Any]:
        """The facts about this robot in a Reply."""
        return {
            "robot": self._spec.name,
            "reason": self.lifecycle.reason,
            "stopped": self.lifecycle.stopped,
            "action_deadline_ms": None if self._watchdog.deadline_s is None else self._watchdog.deadline_s * 1e3,
        }

    def _move(self, command: Command, now: float) -> None:
        if command.verb == "activate" and not self.lifecycle.active:
            self._waiting = True
        self._watchdog.command(command.verb, now, command.reason)
