"""Turns transitions into rows of the replay buffer, each with the rewards of up to n steps.

A row holds R = r₀ + γ r₁ + … + γᵐ⁻¹ rₘ₋₁, the observation m steps later, and the factor γᵐ. The target of the critics
is R plus the factor times the value of that observation (Sutton and Barto 2018, section 7.1). Usually m is n. For the
last n - 1 steps before a gap, before a restart of the source, or before the end of an episode, m is smaller. A target
with fewer rewards is also correct, so every transition gives a row. If a row ends where the episode terminated, its
factor is 0. At a truncation, a gap or a restart, the factor is γᵐ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.learner.experience.transitions import Bools, Robots, Transitions
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32


class Rows(NamedTuple):
    """M rows for the replay buffer: the arguments of :meth:`ReplayBuffer.add`."""

    observation: Float32
    action: Float32
    reward: Float32
    next_observation: Float32
    discount: Float32


class NStep:
    """Combines the transitions of each robot into rows with up to ``steps`` rewards.

    A transition waits until its row is complete. Between two calls of :meth:`add`, each robot has at most n - 1 waiting
    transitions, oldest first. The sum of a row's rewards also includes the unused entries after the waiting
    transitions. So the rewards in these entries must be 0.

    Args:
        steps: n, at least 1. With 1, each transition is a row.
        discount: γ.
    """

    def __init__(self, steps: int, discount: float, observation_size: int, action_size: int) -> None:
        self.steps, self.discount = steps, discount
        self._columns = [
            ("count", np.int64),  # number of waiting transitions
            ("observation", np.float32, (steps, observation_size)),
            ("action", np.float32, (steps, action_size)),
            ("reward", np.float64, (steps,)),
            ("next_observation", np.float32, (observation_size,)),  # at the end of the newest transition
        ]
        self._waiting: dict[str, Robots] = {}

    def add(self, source: str, transitions: Transitions, step: Step) -> Rows:
        """Add the transitions that ``step`` completed. Returns the complete rows, oldest first for each robot."""
        if self.steps == 1:  # a fast path; the code below gives the same rows, ten times slower
            factor = (self.discount * ~transitions.terminated).astype(np.float32)
            return Rows(
                transitions.observation, transitions.action, transitions.reward, transitions.next_observation, factor
            )
        rows: list[Rows] = []
        waiting = self._waiting.get(source)
        if waiting is None or not waiting.belong_to(step):
            if waiting is not None:  # the source has a new process
                rows += self._take(waiting.rows, np.arange(len(waiting.rows)))
            waiting = self._waiting[source] = Robots(step.incarnation, len(step.phase), self._columns)
        robots, window = transitions.robot, waiting.rows
        count, reward = window["count"], window["reward"]
        rows += self._take(window, robots[(count[robots] > 0) & ~waiting.advance(robots, step)])

        last = count[robots]
        for name in ("observation", "action", "reward"):
            window[name][robots, last] = getattr(transitions, name)
        window["next_observation"][robots] = transitions.next_observation
        count[robots] += 1

        over = step.phase[robots] >= Phase.TERMINATED
        rows += self._take(window, robots[over], transitions.terminated[over])
        full = robots[~over & (count[robots] == self.steps)]
        rows.append(self._rows(window, full, False, oldest=True))
        for name in ("observation", "action", "reward"):
            window[name][full, :-1] = window[name][full, 1:]
        reward[full, -1] = 0
        count[full] -= 1
        return _joined(rows)

    def end(self) -> Rows:
        """The rows of all waiting transitions, as if a gap followed them."""
        rows = [self._rows(Robots(0, 0, self._columns).rows, np.arange(0), False)]
        for waiting in self._waiting.values():
            rows += self._take(waiting.rows, np.arange(len(waiting.rows)))
        self._waiting = {}
        return _joined(rows)

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        for source, waiting in self._waiting.items():
            arrays |= waiting.state(f"{source}/")
        incarnations = {source: waiting.incarnation for source, waiting in self._waiting.items()}
        return arrays, {"steps": self.steps, "incarnations": incarnations}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        if scalars["steps"] != self.steps:
            raise ValueError(f"the checkpoint has n_step {scalars['steps']}; this learner has {self.steps}")
        self._waiting = {}
        for source, incarnation in scalars["incarnations"].items():
            waiting = self._waiting[source] = Robots(incarnation, len(arrays[f"{source}/count"]), self._columns)
            waiting.restore(arrays, f"{source}/")

    def _take(self, window: NDArray[Any], robots: NDArray[np.intp], terminated: Bools | bool = False) -> list[Rows]:
        """Remove all waiting transitions of these robots, and return their rows.

        The rows get no more rewards, because of a gap, a restart of the source, or the end of the episode.
        """
        if not len(robots):
            return []
        rows = self._rows(window, robots, terminated)
        window["count"][robots], window["reward"][robots] = 0, 0
        return [rows]

    def _rows(
        self, window: NDArray[Any], robots: NDArray[np.intp], terminated: Bools | bool, *, oldest: bool = False
    ) -> Rows:
        """One row for each waiting transition. With ``oldest``: one row for each robot, from its oldest transition.

        A row ends at the newest transition of its robot.
        """
        returns = np.zeros((len(robots), self.steps + 1))
        for position in reversed(range(self.steps)):
            returns[:, position] = window["reward"][robots, position] + self.discount * returns[:, position + 1]
        counts = window["count"][robots]
        index, first = np.nonzero(np.arange(self.steps) < (np.minimum(counts, 1) if oldest else counts)[:, None])
        robot = robots[index]
        factor = self.discount ** (counts[index] - first) * ~np.broadcast_to(terminated, counts.shape)[index]
        return Rows(
            window["observation"][robot, first],
            window["action"][robot, first],
            returns[index, first].astype(np.float32),
            window["next_observation"][robot],
            factor.astype(np.float32),
        )


def _joined(rows: list[Rows]) -> Rows:
    return Rows(*map(np.concatenate, zip(*rows, strict=True)))
