"""The progress of a learner: steps stored, updates made, and whether an update is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from td3_robot.bundle import Bundle
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError, DivergenceError
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.learner.scheduling.rate_limiter import RateLimiter
from td3_robot.messages import Step
from td3_robot.safety import limits as safety
from td3_robot.specs import RobotSpec

if TYPE_CHECKING:  # the import loads torch
    from td3_robot.learner.training import Training


class Learning:
    """The training of one robot, and its progress.

    Attributes:
        spec: specification of the robot; None until :meth:`begin`.
        training: created by :meth:`begin`.
        env_steps: number of transitions that :meth:`store` received. Transitions from recordings do not count.
        sound_at: ``env_steps`` when ``Reports`` made its newest record; None before the first record.
            ``Reports.sound`` is the policy at that time.
    """

    def __init__(self, config: Config, make_training: Callable[[RobotSpec], Training]) -> None:
        learner = config.learner
        self.config = config
        self.limiter = RateLimiter(
            learner.replay_ratio,
            learner.replay_ratio_band,
            learner.learning_starts,
            config.total_steps,
            learner.offline_updates,
        )
        self.spec: RobotSpec | None = None
        self.training: Training
        self.env_steps = 0
        self.sound_at: int | None = None
        self._make_training = make_training

    def begin(self, spec: RobotSpec, bundle: Bundle | None = None) -> None:
        """Create the training for this robot. With a bundle, the training starts from the bundle's policy."""
        safety.joined(self.config.safety, safety.SafetyConfig(), spec)
        self.training = self._make_training(spec)
        # The configuration does not load algorithms of other packages, so it cannot check these rules.
        if self.training.algorithm.exploration is not None and not self.config.exploration.is_default:
            raise ConfigError("exploration is set, but the algorithm sets its own exploration; leave exploration out")
        if not self.training.on_policy and (problem := self.config.replay_ratio_problem()):
            raise ConfigError(problem)
        if self.training.on_policy:  # one update is due after each rollout
            self.limiter = replace(self.limiter, ratio=None, start=0)
        if bundle:
            self.training.begin_with(bundle)
        self.spec = spec

    @property
    def updates(self) -> int:
        return self.training.algorithm.updates if self.spec else 0

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        progress = self.training.algorithm.progress
        return self.config.learner.learning_rate_at(
            self.env_steps / self.config.total_steps if progress is None else progress
        )

    @property
    def done(self) -> bool:
        """Whether the run has made all its steps and updates, or the algorithm's ``progress`` is 1."""
        ended = self.spec is not None and (self.training.algorithm.progress or 0.0) >= 1
        return ended or self.limiter.done(self.env_steps, self.updates)

    @property
    def offline(self) -> bool:
        """Whether the learner still has to make offline updates."""
        return self.spec is not None and self.updates < self.limiter.offline

    @property
    def update_due(self) -> bool:
        """Whether the replay ratio allows an update, and the training has data for it."""
        return self.limiter.updates_due(self.env_steps, self.updates) and self.training.experience.ready

    @property
    def lead(self) -> float:
        """Number of updates that are due according to the replay ratio; 0 before learning starts or without a ratio."""
        if self.limiter.ratio is None or self.env_steps <= self.limiter.start:
            return 0.0
        return self.limiter.lead(self.env_steps, self.updates)

    @property
    def replay_ratio(self) -> float:
        """Updates per environment step since learning started, without offline updates; 0 before learning starts."""
        after = self.env_steps - self.limiter.start
        return (self.updates - self.limiter.offline) / after if after > 0 else 0.0

    def update(self) -> None:
        self.training.update(self.learning_rate)

    def store(self, transitions: Transitions, step: Step) -> None:
        """Count and store the transitions that a Step completed. Do nothing if there are none."""
        if len(transitions):
            self.training.store(transitions, step)
            self.env_steps += len(transitions)

    def check(self) -> None:
        """Raise DivergenceError if training has diverged. Waits for the device."""
        if self.spec and (problem := self.training.problem()):
            raise self.diverged(problem)

    def diverged(self, problem: str) -> DivergenceError:
        """The error for diverged training. It lists the files that remain."""
        kept = "" if self.sound_at is None else f"the policy after {self.sound_at} steps, and "
        return DivergenceError(
            f"training diverged: {problem} (after {self.env_steps} steps and {self.updates} updates); kept: {kept}the "
            "earlier checkpoints; try a lower learner.learning_rate, or use learner.gradient_clip, learner.layer_norm "
            "or learner.normalise_observations"
        )
