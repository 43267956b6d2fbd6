"""Turns transitions into rows of the replay buffer, each with the rewards of up to n steps.

A row holds R = r₀ + γ r₁ + … + γᵐ⁻¹ rₘ₋₁, the observation m steps later, and the factor γᵐ. The target of the critics
is R plus the factor times the value of that observation (Sutton and Barto 2018, section 7.1). Usually m is n. For the
last n - 1 steps before the end of an episode, a gap or a restart, m is smaller. A target with fewer rewards is also
correct, so every transition gives a row. If the episode terminated, the factor is 0. If the episode was truncated or
has a gap, the factor is γᵐ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.learner.experience.transitions import Bools, Positions, Transitions
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32


class Rows(NamedTuple):
    """M rows for the replay buffer: the arguments of :meth:`ReplayBuffer.add`."""

    observation: Float32
    action: Float32
    reward: Float32
    next_observation: Float32
    discount: Float32


@dataclass(eq=False)
class _Window(Positions):
    """The waiting transitions of one source's robots. A transition waits until its row is complete.

    Between two calls of :meth:`NStep.add`, each robot has at most n - 1 waiting transitions, oldest first. The later
    entries of the arrays are unused, but their rewards must be 0.

    Attributes:
        count: number of waiting transitions of each robot.
        next_observation: observation at the end of each robot's newest transition.
    """

    count: NDArray[np.int64]  # [N]
    observation: Float32  # [N, n, O]
    action: Float32  # [N, n, A]
    reward: NDArray[np.float64]  # [N, n]
    next_observation: Float32  # [N, O]


class NStep:
    """Combines the transitions of each robot into rows with up to ``steps`` rewards.

    Args:
        steps: n, at least 1. With 1, each transition is a row.
        discount: γ.
    """

    def __init__(self, steps: int, discount: float, observation_size: int, action_size: int) -> None:
        self.steps, self.discount = steps, discount
        self._sizes = observation_size, action_size
        self._windows: dict[str, _Window] = {}

    def add(self, source: str, transitions: Transitions, step: Step) -> Rows:
        """Add the transitions that ``step`` completed. Returns the complete rows, oldest first for each robot."""
        if self.steps == 1:  # a fast path; the code below gives the same rows, ten times slower
            factor = (self.discount * ~transitions.terminated).astype(np.float32)
            return Rows(
                transitions.observation, transitions.action, transitions.reward, transitions.next_observation, factor
            )
        rows: list[Rows] = []
        window = self._windows.get(source)
        if window is None or not window.belong_to(step):
            if window is not None:  # the source has a new process
                rows += self._take(window, np.arange(len(window.count)))
            window = self._windows[source] = self._empty(step.incarnation, len(step.phase))
        robots = transitions.robot
        rows += self._take(window, robots[(window.count[robots] > 0) & ~window.advance(robots, step)])

        last = window.count[robots]
        window.observation[robots, last], window.action[robots, last] = transitions.observation, transitions.action
        window.reward[robots, last], window.next_observation[robots] = transitions.reward, transitions.next_observation
        window.count[robots] += 1

        over = step.phase[robots] >= Phase.TERMINATED
        rows += self._take(window, robots[over], transitions.terminated[over])
        full = robots[~over & (window.count[robots] == self.steps)]
        rows.append(self._rows(window, full, False, oldest=True))
        for array in (window.observation, window.action, window.reward):
            array[full, :-1] = array[full, 1:]
        window.reward[full, -1] = 0
        window.count[full] -= 1
        return _joined(rows)

    def end(self) -> Rows:
        """The rows of all waiting transitions, as if a gap followed them."""
        rows = [self._rows(self._empty(0, 0), np.arange(0), False)]
        for window in self._windows.values():
            rows += self._take(window, np.arange(len(window.count)))
        self._windows = {}
        return _joined(rows)

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays = {
            f"{source}/{name}": array.copy()
            for source, window in self._windows.items()
            for name, array in window.arrays().items()
        }
        incarnations = {source: window.incarnation for source, window in self._windows.items()}
        return arrays, {"steps": self.steps, "incarnations": incarnations}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        if scalars["steps"] != self.steps:
            raise ValueError(f"the checkpoint has n_step {scalars['steps']}; this learner has {self.steps}")
        self._windows = {}
        for source, incarnation in scalars["incarnations"].items():
            window = self._windows[source] = self._empty(incarnation, len(arrays[f"{source}/count"]))
            for name, array in window.arrays().items():
                array[:] = arrays[f"{source}/{name}"]

    def _empty(self, incarnation: int, robots: int) -> _Window:
        o, a = self._sizes
        return _Window(
            incarnation,
            np.zeros(robots, np.uint64),
            np.zeros(robots, np.uint32),
            np.zeros(robots, np.int64),
            np.zeros((robots, self.steps, o), np.float32),
            np.zeros((robots, self.steps, a), np.float32),
            np.zeros((robots, self.steps)),
            np.zeros((robots, o), np.float32),
        )

    def _take(self, window: _Window, robots: NDArray[np.intp], terminated: Bools | bool = False) -> list[Rows]:
        """Remove all waiting transitions of robots whose episode or stream ends here, and return their rows."""
        if not len(robots):
            return []
        rows = self._rows(window, robots, terminated)
        window.count[robots], window.reward[robots] = 0, 0
        return [rows]

    def _rows(
        self, window: _Window, robots: NDArray[np.intp], terminated: Bools | bool, *, oldest: bool = False
    ) -> Rows:
        """One row for each waiting transition. With ``oldest``: one row for each robot, from its oldest transition.

        A row ends at the newest transition of its robot.
        """
        returns = np.zeros((len(robots), self.steps + 1))
        for position in reversed(range(self.steps)):
            returns[:, position] = window.reward[robots, position] + self.discount * returns[:, position + 1]
        counts = window.count[robots]
        index, first = np.nonzero(np.arange(self.steps) < (np.minimum(counts, 1) if oldest else counts)[:, None])
        robot = robots[index]
        factor = self.discount ** (counts[index] - first) * ~np.broadcast_to(terminated, counts.shape)[index]
        return Rows(
            window.observation[robot, first],
            window.action[robot, first],
            returns[index, first].astype(np.float32),
            window.next_observation[robot],
            factor.astype(np.float32),
        )


def _joined(rows: list[Rows]) -> Rows:
    return Rows(*map(np.concatenate, zip(*rows, strict=True)))
