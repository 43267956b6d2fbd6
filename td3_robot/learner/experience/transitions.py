"""Makes transitions from the stream of Steps. Only this module joins two Steps and detects missing Steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32, UInt32, UInt64

Bools = NDArray[np.bool_]

# numpy compares an array with a number three times as fast if both have the same type.
_FIRST, _MID, _TERMINATED = (np.uint8(phase) for phase in (Phase.FIRST, Phase.MID, Phase.TERMINATED))


@dataclass(frozen=True, eq=False)
class Transitions:
    """M transitions, one row each. O and A are the numbers of observation and action channels."""

    robot: NDArray[np.intp]  # [M], ascending: the index of each robot in the arrays of the Step
    observation: Float32  # [M, O]
    action: Float32  # [M, A], the applied action, in the units of its channels; later normalised to [-1, 1]
    reward: Float32  # [M]
    next_observation: Float32  # [M, O]
    terminated: Bools  # [M], False for a truncated episode
    ended: list[tuple[float, int]]  # return and length of each whole episode that the newest Step ended

    def __len__(self) -> int:
        return len(self.reward)

    def by_operator(self, step: Step) -> Bools:
        """bool[M]: whether an operator chose the action. ``step`` is the Step that completed the transitions."""
        return np.array([bool(step.operated.get(str(robot))) for robot in self.robot.tolist()], np.bool_)

    def part(self, chosen: Bools) -> Transitions:
        """A selection of the transitions. ``chosen`` is bool[M]. The selection contains all items of ``ended``."""
        rows = {item.name: getattr(self, item.name)[chosen] for item in fields(self) if item.name != "ended"}
        return replace(self, **rows)


class Assembler:
    """Joins the consecutive Steps of one source, robot by robot.

    A transition needs two Steps of one incarnation with consecutive sequence numbers. Both Steps must belong to the
    same episode of the robot, and ``episode_step`` must grow by one. Two Steps do not join if the second Step starts an
    episode (FIRST), if the source has a new incarnation, or if Steps are missing (a gap). So no transition crosses a
    gap.

    After the learner restarts from a checkpoint, the assembler expects Step n, the first Step that is not in the
    checkpoint. The source may first repeat Step n - 1. Then the assembler joins Step n - 1 and Step n.

    Attributes:
        counters: counts by name. ``steps``: accepted Steps. ``begun``: episodes that started. ``episodes``: episodes
            received from start to end. ``transitions``: transitions made. ``gaps``: gaps in the stream. ``missed``:
            Steps that were never received. ``repeated``: Steps received again. ``late``: Steps older than the newest
            Step. ``cut``: episodes without an end, because the source died or Steps were missed.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._expected = 0, 0  # incarnation, sequence
        self._last: Step | None = None
        self._return: NDArray[np.float64] = np.zeros(0)
        self._whole: Bools = np.zeros(0, bool)

    def add(self, step: Step) -> Transitions | None:
        """The transitions that this Step completes; None if the Step is repeated or out of order."""
        last = self._last
        if last is not None and step.incarnation == last.incarnation and step.sequence <= last.sequence:
            self.counters["repeated" if step.sequence == last.sequence else "late"] += 1
            return None
        self._last = step
        first = step.phase == _FIRST
        incarnation, next_sequence = self._expected
        missed = step.sequence - (next_sequence if step.incarnation == incarnation else 0)
        if missed < 0:  # the source repeats a Step that is in the checkpoint
            self.counters["repeated"] += 1
            return None
        self._expected = step.incarnation, step.sequence + 1
        self.counters["steps"] += 1
        self.counters["begun"] += int(np.count_nonzero(first))
        self.counters["missed"] += missed
        self.counters["gaps"] += missed > 0
        if len(self._return) != len(first):
            self._return = np.zeros(len(first))
        if last is None or step.incarnation != last.incarnation or step.phase.shape != last.phase.shape:
            joined = np.zeros(len(first), bool)
        else:
            joined = ~first & _running(last) & _follows(last.episode, last.episode_step, step) & (missed == 0)
        made = int(np.count_nonzero(joined))
        if last is not None:
            self.counters["cut"] += int(np.count_nonzero(_running(last))) - made
        self._return = np.where(first, 0.0, self._return + step.reward)
        self._whole = first | (joined & (self._whole if len(self._whole) == len(first) else False))
        over = self._whole & (step.phase >= _TERMINATED)
        self.counters["episodes"] += int(np.count_nonzero(over))
        self.counters["transitions"] += made
        previous = last if last is not None and made else step
        return Transitions(
            robot=np.flatnonzero(joined),
            observation=previous.observation[joined],
            action=step.action[joined],
            reward=step.reward[joined],
            next_observation=step.observation[joined],
            terminated=(step.phase == _TERMINATED)[joined],
            ended=list(zip(self._return[over].tolist(), step.episode_step[over].tolist(), strict=True)),
        )

    @property
    def incarnation(self) -> int:
        """The source's incarnation; 0 before its first Step."""
        return self._expected[0]

    def state(self) -> dict[str, Any]:
        return {
            "expected": list(self._expected),
            "counters": dict(self.counters),
            "returns": self._return.tolist(),
            "whole": self._whole.tolist(),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Assembler:
        """An assembler that continues from :meth:`state`."""
        assembler = cls()
        incarnation, sequence = state["expected"]
        assembler._expected = int(incarnation), int(sequence)
        assembler.counters.update(state["counters"])
        assembler._return = np.array(state["returns"], np.float64)
        assembler._whole = np.array(state["whole"], bool)
        return assembler


def _running(step: Step) -> Bools:
    """bool[N]: whether each robot's episode continues after this Step."""
    running: Bools = step.phase <= _MID
    return running


class Robots:
    """A table with a row for each robot of a source.

    A row has ``episode`` and ``episode_step`` at the end of the robot's newest transition. It also has further columns.

    Args:
        incarnation: incarnation of the source.
        columns: the further columns, in the form that ``numpy.dtype`` takes.

    Attributes:
        rows: a structured array[N].
    """

    def __init__(self, incarnation: int, count: int, columns: Sequence[Any]) -> None:
        self.incarnation = incarnation
        self.rows: NDArray[Any] = np.zeros(count, [("episode", np.uint64), ("episode_step", np.uint32), *columns])

    def belong_to(self, step: Step) -> bool:
        """Whether a Step has the same incarnation and the same number of robots as this table."""
        return self.incarnation == step.incarnation and len(self.rows) == len(step.episode)

    def advance(self, robots: NDArray[np.intp], step: Step) -> Bools:
        """Copy ``episode`` and ``episode_step`` of these robots from a Step into the table.

        Returns:
            bool[M]: whether the new transition of each robot directly follows the robot's previous transition.
        """
        episode, episode_step = self.rows["episode"], self.rows["episode_step"]
        continues = _follows(episode, episode_step, step)[robots]
        episode[robots], episode_step[robots] = step.episode[robots], step.episode_step[robots]
        return continues

    def state(self, prefix: str) -> dict[str, NDArray[Any]]:
        """A copy of every column. The names of the arrays start with ``prefix``."""
        return {prefix + name: self.rows[name].copy() for name in self.rows.dtype.names or ()}

    def restore(self, arrays: Arrays, prefix: str) -> None:
        for name in self.rows.dtype.names or ():
            self.rows[name] = arrays[prefix + name]


def _follows(episode: UInt64, episode_step: UInt32, after: Step) -> Bools:
    """bool[N]: for each robot, whether ``after`` is in the same episode and one step later."""
    follows: Bools = (after.episode == episode) & (after.episode_step == episode_step + np.uint32(1))
    return follows
