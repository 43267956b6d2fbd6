"""The experience of an off-policy algorithm: a replay buffer with rows of up to n steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.checkpointing.stateful import Stateful
from td3_robot.learner.experience.n_step import NStep
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.learner.replay_buffer.buffer import Batch, ReplayBuffer
from td3_robot.learner.replay_buffer.prioritised import PrioritisedReplay
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.learner.resources import demonstrations
from td3_robot.messages import Step


class Replayed:
    """Draws random transitions from the configured kind of replay buffer.

    With ``operator_share``, a second buffer holds the transitions in which an operator chose the action. If this buffer
    is not empty, each batch contains some of its rows. The n-step returns of the two buffers are separate, so that no
    row mixes both kinds of transitions.

    Args:
        config: the ``learner`` section. Its ``device`` must not be ``auto``.
        seed: seed of the sampling.
        storage: creates the storage for the rows of the replay buffer.
    """

    def __init__(
        self,
        config: LearnerConfig,
        observation_size: int,
        action_size: int,
        seed: int,
        storage: Callable[[int, int], Storage],
    ) -> None:
        sizes = observation_size, action_size
        self.replay: ReplayBuffer
        if config.replay == "lap":
            self.replay = PrioritisedReplay(config.buffer_size, *sizes, seed, config.priority_exponent, storage)
        else:
            self.replay = ReplayBuffer(config.buffer_size, *sizes, seed, storage)
        self.storage = self.replay.storage
        self.n_step = NStep(config.n_step, config.discount, *sizes)
        self.demonstrations = ReplayBuffer(demonstrations(config), *sizes, seed + 1) if config.operator_share else None
        self._demonstrations_n_step = NStep(config.n_step, config.discount, *sizes)
        if config.device == "cuda":
            self.replay.use_device(torch.device("cuda"))
            if self.demonstrations is not None:
                self.demonstrations.use_device(torch.device("cuda"))
        self._splits = self.demonstrations is not None or not config.learn_from_operator
        self._batch_size = self._replayed = config.batch_size
        self._demonstrated = min(max(1, round(config.operator_share * config.batch_size)), config.batch_size - 1)

    @property
    def total_added(self) -> int:
        """The number of rows ever added to the replay buffer, without the rows of the second buffer."""
        return self.replay.total_added

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` can return a batch."""
        return len(self.replay) > 0

    def add(self, transitions: Transitions, step: Step) -> None:
        """Store the transitions that a Step completed. Their actions are already normalised to [-1, 1]."""
        if step.operated and self._splits:
            by_operator = transitions.by_operator(step)
            if self.demonstrations is not None:
                rows = self._demonstrations_n_step.add(step.source, transitions.part(by_operator), step)
                self.demonstrations.add(*rows)
            transitions = transitions.part(~by_operator)
        self.replay.add(*self.n_step.add(step.source, transitions, step))

    def take(self) -> Batch:
        """The batch of the next update. If the second buffer is not empty, the last rows of the batch come from it."""
        batch = self.replay.sample(self._batch_size)
        if self.demonstrations:
            self._replayed = self._batch_size - self._demonstrated
            for column, drawn in zip(batch, self.demonstrations.sample(self._demonstrated), strict=True):
                column[self._replayed :] = drawn
        return batch

    def learned(self, td_errors: Sequence[Tensor]) -> None:
        """Give the replay buffer the TD errors of the newest batch, see ``Algorithm.td_errors``."""
        self.replay.learned([errors[: self._replayed] for errors in td_errors])

    def end(self) -> None:
        """Store the rows of the transitions that wait for later rewards. Call this method at the end of a recording."""
        self.replay.add(*self.n_step.end())
        if self.demonstrations is not None:
            self.demonstrations.add(*self._demonstrations_n_step.end())

    def recover(self) -> None:
        """Use the rows that an earlier process wrote to a durable storage."""
        self.replay.recover()

    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint, by name."""
        parts: dict[str, Stateful] = {"replay": self.replay, "n_step": self.n_step}
        if self.demonstrations is not None:
            parts |= {"demonstrations": self.demonstrations, "demonstrations_n_step": self._demonstrations_n_step}
        return parts
