"""What critics expect of episodes from their first step on, beside what these then brought.

The difference is the bias of Q that Fujimoto et al. 2018 measure in section 4 (their figure 1), which the
second critic reduces. Only whole episodes count, with their exploration noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from td3_robot.errors import BundleError
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.learner.normaliser import Normaliser
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32

_RECENT = 20  # episodes compared


class Episode(NamedTuple):
    """One that was seen whole.

    Attributes:
        observation, action: of its first step, [O] and [A].
        discounted: r₀ + γ r₁ + … + γᵀ⁻¹ r_T₋₁, the rewards that came.
        last_observation: where it ended, [O].
        left: γᵀ, what the value of that still counts with; 0 if it terminated.
    """

    observation: Float32
    action: Float32
    discounted: float
    last_observation: Float32
    left: float


@dataclass(eq=False)
class _Robots:
    """The episodes under way of one source's robots.

    Attributes:
        episode, episode_step: where each robot is.
        whole: whether it was seen from its first step on without a gap.
        observation, action: of the first step.
        discounted, left: as in :class:`Episode`, so far.
    """

    incarnation: int
    episode: NDArray[np.uint64]
    episode_step: NDArray[np.uint32]
    whole: NDArray[np.bool_]
    observation: Float32
    action: Float32
    discounted: NDArray[np.float64]
    left: NDArray[np.float64]


_ARRAYS = tuple(item.name for item in fields(_Robots) if item.name != "incarnation")


class ValueCheck:
    """Collects the newest whole episodes of all sources.

    Args:
        discount: γ, 0 to 1.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.episodes: deque[Episode] = deque(maxlen=_RECENT)
        self._robots: dict[str, _Robots] = {}

    def add(self, source: str, transitions: Transitions, step: Step) -> None:
        """Take in the transitions that ``step`` completed."""
        robots = self._robots.get(source)
        if robots is None or (robots.incarnation, len(robots.whole)) != (step.incarnation, len(step.phase)):
            robots = self._robots[source] = self._none(step)
        who = transitions.robot
        episode, episode_step = step.episode[who], step.episode_step[who]
        begins = episode_step == 1
        goes_on = (robots.episode[who] == episode) & (robots.episode_step[who] + np.uint32(1) == episode_step)
        robots.whole[who] = begins | (robots.whole[who] & goes_on)
        robots.episode[who], robots.episode_step[who] = episode, episode_step
        if begins.any():
            first = who[begins]
            robots.observation[first], robots.action[first] = (
                transitions.observation[begins],
                transitions.action[begins],
            )
            robots.discounted[first], robots.left[first] = 0.0, 1.0
        robots.discounted[who] += robots.left[who] * transitions.reward
        robots.left[who] *= self.discount
        over = step.phase[who] >= Phase.TERMINATED
        for index in np.flatnonzero(over & robots.whole[who]):
            robot = who[index]
            left = 0.0 if transitions.terminated[index] else float(robots.left[robot])
            self.episodes.append(
                Episode(
                    robots.observation[robot].copy(),
                    robots.action[robot].copy(),
                    float(robots.discounted[robot]),
                    transitions.next_observation[index].copy(),
                    left,
                )
            )

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """A copy of everything :meth:`restore` needs: arrays, and scalars fit for JSON."""
        arrays: dict[str, NDArray[Any]] = {}
        if self.episodes:
            arrays |= {f"episode.{name}": np.stack(column) for name, column in _columns(self.episodes)}
        for number, robots in enumerate(self._robots.values()):
            arrays |= {f"{number}.{name}": getattr(robots, name).copy() for name in _ARRAYS}
        return arrays, {"sources": [[name, robots.incarnation] for name, robots in self._robots.items()]}

    def restore(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`.

        Raises:
            BundleError: the state is incomplete or damaged.
        """
        try:
            robots = {
                str(name): _Robots(int(incarnation), *(arrays[f"{number}.{key}"].copy() for key in _ARRAYS))
                for number, (name, incarnation) in enumerate(scalars["sources"])
            }
            columns = [arrays[f"episode.{name}"] for name in Episode._fields] if "episode.left" in arrays else []
            rows = zip(*columns, strict=True) if columns else ()
            episodes = [Episode(o.copy(), a.copy(), float(d), last.copy(), float(left)) for o, a, d, last, left in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"state of the value check: {type(error).__name__} {error}") from None
        self._robots = robots
        self.episodes = deque(episodes, maxlen=_RECENT)

    def figures(self, algorithm: Algorithm, normaliser: Normaliser | None) -> dict[str, float]:
        """Means over the newest whole episodes; nothing before there is one, or without values. Waits for the device.

        ``return_discounted_mean`` is what came from the first step on, ``return_expected_mean`` what the first critic
        says now. Where an episode was cut off, what it says of the rest is part of neither.
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

    def _none(self, step: Step) -> _Robots:
        robots = len(step.phase)
        return _Robots(
            step.incarnation,
            np.zeros(robots, np.uint64),
            np.zeros(robots, np.uint32),
            np.zeros(robots, bool),
            np.zeros_like(step.observation),
            np.zeros_like(step.action),
            np.zeros(robots),
            np.zeros(robots),
        )


def _columns(episodes: Iterable[Episode]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    return zip(Episode._fields, zip(*episodes, strict=True), strict=True)
