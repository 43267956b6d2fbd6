"""The policy server's watch over one source: the observations must arrive, be valid and change."""

from __future__ import annotations

from td3_robot.messages import Phase, Step
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.safety.lifecycle import Lifecycle, Watchdog


class Watch:
    """The server's watch over one simulator process or robot.

    While all robots of the source are in ``reset()``, ``reset_timeout_ms`` replaces ``observation_deadline_ms``.
    A reset lasts from the last Step of an episode to the first Step of the next episode.

    Attributes:
        newest: the newest Step. If no further Step comes, the server answers this Step with the safe action.
    """

    def __init__(self, name: str, now: float) -> None:
        self.lifecycle = Lifecycle(name)
        self.lifecycle.command("configure", now, "a source has joined")
        self.lifecycle.command("activate", now, "a source has joined")
        self.watchdog = Watchdog(self.lifecycle, "observation")
        self.newest: Step | None = None
        self._problem: str | None = None  # what is wrong with the newest observation
        self._different = now  # when the observation changed last
        self._deadline_s: float | None = None  # deadline for the next observation within an episode
        self._ended: float | None = None  # when the last Step of an episode came; None within an episode

    @property
    def resetting(self) -> bool:
        """Whether all robots of the source are between two episodes."""
        return self._ended is not None

    def take(self, step: Step, safety: SafetyFilter, now: float) -> str | None:
        """Take a Step. If the policy must not answer this Step, return the reason; otherwise return None.

        ``safety`` is the policy's filter.
        """
        envelope = safety.envelope
        before, self.newest = self.newest, step
        problem = safety.problem(step.observation)
        again = before is not None and (before.incarnation, before.sequence) == (step.incarnation, step.sequence)
        self._deadline_s, self.watchdog.recovery_s = envelope.observation_deadline_s, envelope.recovery_s
        if not again:
            self._take_phase(step, safety.spec.control_period, now)
        in_reset = self.resetting and self._deadline_s is not None
        self.watchdog.deadline_s = envelope.reset_timeout_s if in_reset else self._deadline_s
        if envelope.frozen_s is not None and not again:
            if before is None or before.observation.tobytes() != step.observation.tobytes():
                self._different = now
            elif now - self._different > envelope.frozen_s:
                problem = problem or f"the observation has been the same for {envelope.frozen_s * 1e3:.0f} ms"
        self._problem = problem
        if problem is None and not again:  # a repeated Step is no new observation
            self.watchdog.feed(now)
        elif not again:
            self.watchdog.arm(now)  # FAULT follows after the deadline if no valid observation comes
            self.watchdog.interrupt()
        return problem or (None if self.lifecycle.active else self.lifecycle.reason)

    def _take_phase(self, step: Step, period: float, now: float) -> None:
        """Record the start and the end of a reset. ``period`` is the control period in seconds."""
        if self._ended is not None:
            self._different += now - self._ended
            # If this server was suspended, the first Step that it receives after a reset is possibly from the middle of
            # an episode. In this case, the server has missed the earlier observations of this episode.
            late = float(step.episode_step.max()) * period
            if self._deadline_s is not None and late > self._deadline_s:
                reason = f"no observation for {self._deadline_s * 1e3:.0f} ms"
                self.lifecycle.fault(f"{reason}: the episode began {late * 1e3:.0f} ms ago", now)
        self._ended = now if (step.phase >= Phase.TERMINATED).all() else None

    def missing(self, now: float) -> bool:
        """If observations have been missing for too long in state active, change to FAULT and return True.

        Otherwise return False, for example because the state is FAULT already.
        """
        why = "the robot did not come back from its reset" if self.resetting else self._problem
        return self.watchdog.check(now, why)

    def end_reset(self) -> None:
        """Stop waiting for the end of a reset. The observation deadline counts from the last Step of the episode."""
        if self.resetting:
            self._ended, self.watchdog.deadline_s = None, self._deadline_s
