"""The base class of experience: it stores arriving transitions, and makes batches for an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from td3_robot.learner.checkpointing.stateful import Stateful
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.learner.replay_buffer.storage import Note
from td3_robot.messages import Step


class Experience(ABC):
    """Stores transitions and makes batches of them. Actions in batches are normalised to [-1, 1]."""

    @property
    @abstractmethod
    def total_added(self) -> int:
        """Rows stored so far."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether :meth:`take` has a batch."""

    @abstractmethod
    def add(self, transitions: Transitions, step: Step) -> None:
        """Store the transitions that a Step completed; there is at least one."""

    @abstractmethod
    def take(self) -> Batch:
        """The batch of the next update."""

    def example(self) -> Batch | None:
        """A batch of random numbers, with the size and memory layout of all batches; None if sizes differ."""
        return None

    def learned(self, td_errors: Sequence[Tensor]) -> None:
        """Use the TD errors of the update on the newest batch, see ``Algorithm.td_errors``."""
        del td_errors

    def end(self) -> None:
        """Store the incomplete rows; no source continues after this."""
        return

    @property
    def durable(self) -> bool:
        """Whether stored rows outlive this process."""
        return False

    @property
    def notes(self) -> Mapping[str, Note]:
        """The newest note of each source in a durable storage."""
        return {}

    def commit(self, env_steps: int, source: str, state: dict[str, Any], seen: dict[str, Any]) -> None:
        """Record the progress of the learner and of a source in a durable storage, see :class:`Note`."""
        del env_steps, source, state, seen

    def recover(self) -> None:
        """Use the rows of an earlier process that a durable storage holds."""
        return

    @abstractmethod
    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint, by name."""
