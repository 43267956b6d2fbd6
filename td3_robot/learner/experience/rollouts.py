"""The experience of an on-policy algorithm: episodes, or pieces of very long episodes.

The algorithm uses each piece for one update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.learner.checkpointing.stateful import Arrays, Stateful
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32

LONGEST = 100_000
"""The largest number of steps in one piece of an episode, and so in one batch."""


@dataclass
class _Episode:
    """The current piece of the running episode of one robot."""

    incarnation: int  # of the source
    number: int
    before: int  # number of the episode's steps before this piece
    rows: list[Float32] = field(default_factory=list)  # the steps of this piece so far


class Rollouts:
    """Collects the steps of each robot, and makes one batch of each finished piece of an episode.

    A piece ends when its episode ends, or after :data:`LONGEST` steps; then the next piece begins. So most episodes are
    one piece, but an episode without an end also gives batches. A piece with a gap gives no batch. If an operator has
    the robot during a piece, this piece gives no batch either: the algorithm learns only from its own policy.

    This class has the same methods as :class:`td3_robot.learner.experience.replayed.Replayed`.
    """

    def __init__(self, discount: float, observation_size: int, action_size: int) -> None:
        self.discount = discount
        self.total_added = 0
        self.storage = Storage(0, 0)  # unused: only checkpoints store rollouts
        self._widths = [observation_size, action_size, 1, observation_size, 1]
        self._running: dict[tuple[str, int], _Episode] = {}  # by source and robot
        self._ended: deque[Float32] = deque()  # the finished pieces, each [steps, sum of the widths]

    @property
    def ready(self) -> bool:
        """Whether there is a finished piece that no update has used."""
        return len(self._ended) > 0

    def add(self, transitions: Transitions, step: Step) -> None:
        if step.operated:
            own = [str(robot) not in step.operated for robot in transitions.robot.tolist()]
            transitions = transitions.part(np.array(own, np.bool_))
        factor = self.discount * ~transitions.terminated
        columns = (
            transitions.observation,
            transitions.action,
            transitions.reward[:, None],
            transitions.next_observation,
            factor.astype(np.float32)[:, None],
        )
        rows: Float32 = np.concatenate(columns, axis=1)
        self.total_added += len(rows)
        for row, robot in zip(rows, transitions.robot.tolist(), strict=True):
            self._add(row, robot, step)

    def _add(self, row: Float32, robot: int, step: Step) -> None:
        key, number, made = (step.source, robot), int(step.episode[robot]), int(step.episode_step[robot])
        if (made - 1) % LONGEST == 0:
            self._running[key] = _Episode(step.incarnation, number, made - 1)
        episode = self._running.get(key)
        if episode is None:
            return
        expected = episode.incarnation, episode.number, episode.before + len(episode.rows) + 1
        if expected != (step.incarnation, number, made):
            del self._running[key]  # a gap
            return
        episode.rows.append(row)
        if step.phase[robot] >= Phase.TERMINATED or made % LONGEST == 0:
            self._ended.append(np.stack(self._running.pop(key).rows))

    def take(self) -> Batch:
        """Remove the oldest finished piece, and return its steps, in order, as one batch.

        ``discount`` is γ, but 0 for the last step of an episode that terminated.
        """
        rows = self._ended.popleft()
        # Torch's memory always has the same alignment, so equal rollouts give bitwise equal results.
        memory = torch.empty(rows.shape)
        memory.numpy()[:] = rows
        return Batch(*torch.split(memory, self._widths, 1))

    def learned(self, td_errors: Sequence[Tensor]) -> None:
        """Does nothing: rollouts do not use TD errors."""

    def end(self) -> None:
        """Does nothing at the end of a recording: an unfinished piece gives no batch."""

    def recover(self) -> None:
        """Does nothing: the rollouts that came after the newest checkpoint are in no file."""

    def parts(self) -> dict[str, Stateful]:
        return {"rollouts": self}

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        running = {key: episode for key, episode in self._running.items() if episode.rows}
        arrays: dict[str, NDArray[Any]] = {f"ended.{index}": rows for index, rows in enumerate(self._ended)}
        arrays |= {f"running.{index}": np.stack(episode.rows) for index, episode in enumerate(running.values())}
        where = [[*key, episode.incarnation, episode.number, episode.before] for key, episode in running.items()]
        return arrays, {"running": where, "ended": len(self._ended), "added": self.total_added}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        self.total_added = int(scalars["added"])
        self._ended = deque(arrays[f"ended.{index}"] for index in range(scalars["ended"]))
        self._running = {
            (source, robot): _Episode(incarnation, number, before, list(arrays[f"running.{index}"]))
            for index, (source, robot, incarnation, number, before) in enumerate(scalars["running"])
        }
