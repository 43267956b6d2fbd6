"""Compares the returns that the critic predicts for whole episodes with the observed returns.

The difference is the bias of Q that Fujimoto et al. 2018 measure in section 4 (their figure 1). A second critic
reduces this bias. The comparison uses only whole episodes. Their actions include exploration noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.learner.experience.transitions import Robots, Transitions
from td3_robot.learner.normaliser import Normaliser
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32

_RECENT = 20  # number of the newest episodes to compare
_TERMINATED = np.uint8(Phase.TERMINATED)


class Episode(NamedTuple):
    """A whole episode: the learner received all of its T steps.

    O and A are the numbers of observation and action channels.
    """

    observation: Float32  # [O], of the first step
    action: Float32  # [A], of the first step
    discounted: float  # the observed return r₀ + γ r₁ + … + γᵀ⁻¹ r_T₋₁
    last_observation: Float32  # [O]
    left: float  # γᵀ, which discounts the value of ``last_observation``; 0 if the episode terminated


def _running(incarnation: int, observation: Float32, action: Float32) -> Robots:
    """A table for the running episodes of one source's robots.

    The shapes of the observations [N, O] and actions [N, A] set the number of robots and the sizes of the columns.
    """
    return Robots(
        incarnation,
        len(observation),
        [
            ("whole", np.bool_),  # whether the learner received all steps of the episode so far
            ("observation", np.float32, observation.shape[1:]),  # of the first step
            ("action", np.float32, action.shape[1:]),  # of the first step
            ("discounted", np.float64),  # this column and ``left``: see ``Episode``, but only for the steps so far
            ("left", np.float64),
        ],
    )


class ValueCheck:
    """Collects the newest whole episodes of all sources."""

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.episodes: deque[Episode] = deque(maxlen=_RECENT)
        self._running: dict[str, Robots] = {}

    def add(self, source: str, transitions: Transitions, step: Step) -> None:
        """Add the transitions that ``step`` completed."""
        running = self._running.get(source)
        if running is None or not running.belong_to(step):
            running = self._running[source] = _running(step.incarnation, step.observation, step.action)
        rows, robots = running.rows, transitions.robot
        whole, discounted, left = rows["whole"], rows["discounted"], rows["left"]
        begins = step.episode_step[robots] == 1
        continues = running.advance(robots, step)
        whole[robots] = begins | (whole[robots] & continues)
        if begins.any():
            first = robots[begins]
            rows["observation"][first] = transitions.observation[begins]
            rows["action"][first] = transitions.action[begins]
            discounted[first], left[first] = 0.0, 1.0
        discounted[robots] += left[robots] * transitions.reward
        left[robots] *= self.discount
        over = step.phase[robots] >= _TERMINATED
        for index in np.flatnonzero(over & whole[robots]):
            robot = robots[index]
            self.episodes.append(
                Episode(
                    rows["observation"][robot].copy(),
                    rows["action"][robot].copy(),
                    float(discounted[robot]),
                    transitions.next_observation[index].copy(),
                    0.0 if transitions.terminated[index] else float(left[robot]),
                )
            )

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        if self.episodes:
            columns = zip(Episode._fields, zip(*self.episodes, strict=True), strict=True)
            arrays |= {f"episode.{name}": np.stack(column) for name, column in columns}
        for number, running in enumerate(self._running.values()):
            arrays |= running.state(f"{number}.")
        return arrays, {"sources": [[name, running.incarnation] for name, running in self._running.items()]}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        self._running = {}
        for number, (name, incarnation) in enumerate(scalars["sources"]):
            running = _running(incarnation, arrays[f"{number}.observation"], arrays[f"{number}.action"])
            running.restore(arrays, f"{number}.")
            self._running[name] = running
        self.episodes.clear()
        if "episode.left" in arrays:
            columns = (arrays[f"episode.{name}"] for name in Episode._fields)
            self.episodes.extend(map(Episode, *columns))

    def figures(self, algorithm: Algorithm, normaliser: Normaliser | None) -> dict[str, float]:
        """Means over the newest whole episodes. Waits for the device.

        ``return_discounted_mean`` is the observed return. ``return_expected_mean`` is the return that the first critic
        predicts now. For a truncated episode, neither return includes the value of the last observation.

        The result is empty until the first whole episode has ended. It is always empty if the algorithm computes no
        values.
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
