"""From the stream of Steps to transitions: the only place where two Steps are joined, and where gaps are seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32


@dataclass(frozen=True, eq=False)
class Transitions:
    """M transitions, one row each.

    Attributes:
        observation, next_observation: float32[M, O].
        action: float32[M, A], the action really applied, in the unit of its channel.
        reward: float32[M].
        terminated: bool[M]; a truncated end is not terminated: the value goes on beyond it.
        ended: the returns (float) of the episodes that ended here and were seen whole.
    """

    observation: Float32
    action: Float32
    reward: Float32
    next_observation: Float32
    terminated: NDArray[np.bool_]
    ended: list[float]

    def __len__(self) -> int:
        return len(self.reward)


class Assembler:
    """Joins the consecutive Steps of one source, robot by robot.

    A transition needs two Steps of the same incarnation with consecutive sequence numbers, in which the robot stays in
    the same episode and moves on by one step. Anything else is an edge (FIRST) or a gap (counted, never joined over).
    ``counters``: steps (messages), transitions, gaps (places), missed (Steps never seen), repeated, late.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._last: Step | None = None
        self._return: NDArray[np.float64] = np.zeros(0)
        self._whole: NDArray[np.bool_] = np.zeros(0, bool)

    @property
    def next_sequence(self) -> int:
        """The sequence number that continues without a gap."""
        return self._last.sequence + 1 if self._last else 0

    def add(self, step: Step) -> Transitions | None:
        """The transitions that this Step completes (possibly none); None for a Step seen before or out of order."""
        last = self._last
        if last is not None and step.incarnation == last.incarnation and step.sequence <= last.sequence:
            self.counters["repeated" if step.sequence == last.sequence else "late"] += 1
            return None
        self.counters["steps"] += 1
        self._last = step
        first = step.phase == Phase.FIRST
        if last is None or step.incarnation != last.incarnation or step.phase.shape != last.phase.shape:
            self.counters["missed"] += step.sequence
            self.counters["gaps"] += step.sequence > 0
            joined = np.zeros(len(first), bool)
            self._return = np.zeros(len(first))
            self._whole = joined.copy()
        else:
            missed = step.sequence - last.sequence - 1
            self.counters["missed"] += missed
            self.counters["gaps"] += missed > 0
            open_before = (last.phase == Phase.FIRST) | (last.phase == Phase.MID)
            follows = (step.episode == last.episode) & (step.episode_step == last.episode_step + 1)
            joined = ~first & open_before & follows & (missed == 0)
        self._return = np.where(first, 0.0, self._return + step.reward)
        self._whole = first | (self._whole & joined)
        over = self._whole & (step.phase >= Phase.TERMINATED)
        self.counters["transitions"] += int(joined.sum())
        previous = last if last is not None and joined.any() else step
        return Transitions(
            observation=previous.observation[joined],
            action=step.action[joined],
            reward=step.reward[joined],
            next_observation=step.observation[joined],
            terminated=(step.phase == Phase.TERMINATED)[joined],
            ended=[float(value) for value in self._return[over]],
        )
