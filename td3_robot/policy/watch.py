"""The policy server's watch over one source: the observations must arrive, be valid and change."""

from __future__ import annotations

from td3_robot.messages import Step
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.safety.lifecycle import Lifecycle, Watchdog


class Watch:
    """The server's watch over one simulator process or robot.

    Attributes:
        lifecycle: its state, named ``server/source``.
        watchdog: takes the lifecycle to FAULT when observations are missing.
        newest: the newest Step. If no further Step comes, the server answers it with the safe action.
    """

    def __init__(self, name: str, now: float) -> None:
        self.lifecycle = Lifecycle(name)
        self.lifecycle.command("configure", now, "a source has joined")
        self.lifecycle.command("activate", now, "a source has joined")
        self.watchdog = Watchdog(self.lifecycle, "observation")
        self.newest: Step | None = None
        self._problem: str | None = None  # of the newest observation
        self._different = now  # when the observation changed last

    def take(self, step: Step, safety: SafetyFilter, now: float) -> str | None:
        """Take a new Step.

        Args:
            step: from the source.
            safety: the settings of the policy that would answer the Step.
            now: the time, in seconds.

        Returns:
            Why the policy may not answer the Step; None if it may.
        """
        envelope = safety.envelope
        self.watchdog.deadline_s, self.watchdog.recovery_s = envelope.observation_deadline_s, envelope.recovery_s
        before, self.newest = self.newest, step
        problem = safety.problem(step.observation)
        again = before is not None and (before.incarnation, before.sequence) == (step.incarnation, step.sequence)
        if envelope.frozen_s is not None and not again:
            if before is None or before.observation.tobytes() != step.observation.tobytes():
                self._different = now
            elif now - self._different > envelope.frozen_s:
                problem = problem or f"the observation has been the same for {envelope.frozen_s * 1e3:.0f} ms"
        self._problem = problem
        if problem is None and not again:  # a repeated Step is not new
            self.watchdog.feed(now)
        elif not again:
            self.watchdog.arm(now)  # invalid observations only: FAULT after the deadline
        return problem or (None if self.lifecycle.active else self.lifecycle.reason)

    def missing(self, now: float) -> bool:
        """Whether this call found that observations have been missing for too long."""
        return self.watchdog.bites(now, self._problem)

    def command(self, verb: str, now: float, reason: str) -> None:
        """Apply a Command: activate, deactivate, reset or estop.

        Raises:
            LifecycleError: the state forbids it.
        """
        if verb == "activate" and not self.lifecycle.active:
            self.watchdog.disarm()
        self.lifecycle.command(verb, now, reason)
