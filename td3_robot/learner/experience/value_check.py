"""Compares the returns that the critic predicts for whole episodes with the observed returns.

The difference is the bias of Q that Fujimoto et al. 2018 measure in section 4 (their figure 1). A second critic
reduces this bias. Only whole episodes count. Their actions include exploration noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.learner.experience.transitions import Bools, Positions, Transitions
from td3_robot.learner.normaliser import Normaliser
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32

_RECENT = 20  # number of compared episodes, the newest ones
_TERMINATED = np.uint8(Phase.TERMINATED)


class Episode(NamedTuple):
    """An episode that the learner received from its first to its last step.

    Attributes:
        observation, action: observation [O] and action [A] of the first step.
        discounted: the observed return r₀ + γ r₁ + … + γᵀ⁻¹ r_T₋₁.
        last_observation: the observation at the end, [O].
        left: γᵀ, the factor of the value of ``last_observation``; 0 if the episode terminated.
    """

    observation: Float32
    action: Float32
    discounted: float
    last_observation: Float32
    left: float


@dataclass(eq=False)
class _Running(Positions):
    """The running episodes of one source's robots.

    Attributes:
        whole: whether the learner received all steps of the episode so far.
        observation, action: observation and action of the first step.
        discounted, left: the values of :class:`Episode` for the steps so far.
    """

    whole: Bools
    observation: Float32
    action: Float32
    discounted: NDArray[np.float64]
    left: NDArray[np.float64]


_ARRAYS = [item.name for item in fields(_Running) if item.name != "incarnation"]


class ValueCheck:
    """Collects the newest whole episodes of all sources."""

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.episodes: deque[Episode] = deque(maxlen=_RECENT)
        self._running: dict[str, _Running] = {}

    def add(self, source: str, transitions: Transitions, step: Step) -> None:
        """Add the transitions that ``step`` completed."""
        running = self._running.get(source)
        if running is None or not running.belong_to(step):
            count = len(step.phase)
            running = self._running[source] = _Running(
                step.incarnation,
                np.zeros(count, np.uint64),
                np.zeros(count, np.uint32),
                np.zeros(count, bool),
                np.zeros_like(step.observation),
                np.zeros_like(step.action),
                np.zeros(count),
                np.zeros(count),
            )
        robots = transitions.robot
        begins = step.episode_step[robots] == 1
        continues = running.advance(robots, step)
        running.whole[robots] = begins | (running.whole[robots] & continues)
        if begins.any():
            first = robots[begins]
            running.observation[first] = transitions.observation[begins]
            running.action[first] = transitions.action[begins]
            running.discounted[first], running.left[first] = 0.0, 1.0
        running.discounted[robots] += running.left[robots] * transitions.reward
        running.left[robots] *= self.discount
        over = step.phase[robots] >= _TERMINATED
        for index in np.flatnonzero(over & running.whole[robots]):
            robot = robots[index]
            left = 0.0 if transitions.terminated[index] else float(running.left[robot])
            self.episodes.append(
                Episode(
                    running.observation[robot].copy(),
                    running.action[robot].copy(),
                    float(running.discounted[robot]),
                    transitions.next_observation[index].copy(),
                    left,
                )
            )

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        if self.episodes:
            columns = zip(Episode._fields, zip(*self.episodes, strict=True), strict=True)
            arrays |= {f"episode.{name}": np.stack(column) for name, column in columns}
        for number, running in enumerate(self._running.values()):
            arrays |= {f"{number}.{name}": array.copy() for name, array in running.arrays().items()}
        return arrays, {"sources": [[name, running.incarnation] for name, running in self._running.items()]}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        self._running = {
            name: _Running(incarnation, *(arrays[f"{number}.{key}"].copy() for key in _ARRAYS))
            for number, (name, incarnation) in enumerate(scalars["sources"])
        }
        self.episodes.clear()
        if "episode.left" in arrays:
            columns = (arrays[f"episode.{name}"] for name in Episode._fields)
            self.episodes.extend(map(Episode, *columns))

    def figures(self, algorithm: Algorithm, normaliser: Normaliser | None) -> dict[str, float]:
        """Means over the newest whole episodes. Waits for the device.

        ``return_discounted_mean`` is the observed return. ``return_expected_mean`` is the return that the first critic
        predicts now. For a truncated episode, neither includes the value of the last observation. There are no means
        before the first whole episode, or if the algorithm has no values.
        """
        if not self.episodes:
            return {}
        first, action, discounted, last, left = map(np.stack, zip(*self.episodes, strict=True))
        column = torch.zeros(len(first), 1)
        batch = Batch(torch.from_numpy(first), torch.from_numpy(action), column, torch.from_numpy(last), column)
        if normaliser:
            batch = normaliser(batch)
        begin, end = algorithm.values(batch.observation, batch.action), algorithm.values(batch.next_observation)
        if begin is None or end is None:
            return {}
        expected = begin[:, 0].cpu().numpy() - left * end[:, 0].cpu().numpy()
        return {
            "return_discounted_mean": float(discounted.mean()),
            "return_expected_mean": float(expected.mean()),
        }
