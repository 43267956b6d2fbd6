"""Keeps transitions in which an operator chose the action. They have a buffer of their own."""

from __future__ import annotations

import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.checkpointing.stateful import Stateful
from td3_robot.learner.experience.n_step import NStep
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.learner.replay_buffer.buffer import Batch, ReplayBuffer
from td3_robot.learner.resources import demonstrations
from td3_robot.messages import Step


class Demonstrations:
    """Keeps the newest transitions in which an operator chose the action, and puts some of them into each batch.

    Args:
        config: the ``learner`` section; ``operator_share`` is above 0.
        observation_size, action_size: O and A.
        seed: seed of the sampling, at least 0.

    Attributes:
        buffer: the rows of these transitions.
        in_batch: number of these transitions in each batch, less than the batch size. While ``buffer`` is empty, a
            batch contains none.
    """

    def __init__(self, config: LearnerConfig, observation_size: int, action_size: int, seed: int) -> None:
        self.buffer = ReplayBuffer(demonstrations(config), observation_size, action_size, seed)
        if config.device == "cuda":
            self.buffer.use_device(torch.device(config.device))
        self.in_batch = min(max(1, round(config.operator_share * config.batch_size)), config.batch_size - 1)
        self._n_step = NStep(config.n_step, config.discount, observation_size, action_size)

    def add(self, transitions: Transitions, step: Step) -> None:
        """Store transitions that ``step`` completed. An operator must have chosen the action of each of them."""
        self.buffer.add(*self._n_step.add(step.source, transitions, step))

    def mix_into(self, batch: Batch) -> int:
        """Replace the last rows of a batch by rows of ``buffer``. Return the number of rows that stay unchanged."""
        first = len(batch.reward)
        if len(self.buffer):
            first -= self.in_batch
            for column, drawn in zip(batch, self.buffer.sample(self.in_batch), strict=True):
                column[first:] = drawn
        return first

    def end(self) -> None:
        """Store the incomplete rows."""
        self.buffer.add(*self._n_step.end())

    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint, by name."""
        return {"demonstrations": self.buffer, "demonstrations_n_step": self._n_step}
