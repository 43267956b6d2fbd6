"""From transitions to what is stored for replay: rows with rewards of up to n steps.

A row is R = r₀ + γ r₁ + … + γᵐ⁻¹ rₘ₋₁, the observation m steps on, and the factor γᵐ that its value counts with
(Sutton and Barto 2018, section 7.1). m is n, or less for the last n - 1 steps of an episode, and of what was seen of
one before a gap or a restart: fewer rewards make a target that is just as right, and no transition is lost. TERMINATED
makes the factor 0; TRUNCATED and gaps do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import BundleError
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32


class Rows(NamedTuple):
    """M rows for the replay buffer, in the units of the transitions: see :meth:`ReplayBuffer.add`."""

    observation: Float32  # [M, O]
    action: Float32  # [M, A]
    reward: Float32  # [M]
    next_observation: Float32  # [M, O]
    discount: Float32  # [M]


@dataclass(eq=False)
class _Window:
    """The newest transitions of one source's robots that have no row yet: at most n - 1 of each between two calls.

    Attributes:
        episode, episode_step: of each robot's newest transition's end.
        count: transitions of each robot here, oldest first; what lies beyond is not used, but rewards there are 0.
        next_observation: where the newest one ended.
    """

    episode: NDArray[np.uint64]  # [N]
    episode_step: NDArray[np.uint32]  # [N]
    count: NDArray[np.int64]  # [N]
    observation: Float32  # [N, n, O]
    action: Float32  # [N, n, A]
    reward: NDArray[np.float64]  # [N, n]
    next_observation: Float32  # [N, O]


class NStep:
    """Collects the transitions of all sources into rows of up to ``steps`` rewards.

    Args:
        steps: n, at least 1. With 1 a transition is a row at once.
        discount: γ, 0 to 1.
        observation_size, action_size: O and A.
    """

    def __init__(self, steps: int, discount: float, observation_size: int, action_size: int) -> None:
        self.steps, self.discount = steps, discount
        self._sizes = observation_size, action_size
        self._windows: dict[str, _Window] = {}
        self._incarnations: dict[str, int] = {}

    def add(self, source: str, transitions: Transitions, step: Step) -> Rows:
        """The rows that these transitions complete, oldest first for each robot.

        Args:
            source: whose they are.
            transitions: as the source's :class:`Assembler` made them of ``step``.
        """
        if self.steps == 1:  # nothing waits; what follows would say the same at ten times the cost
            factor = self.discount * ~transitions.terminated
            return Rows(
                transitions.observation,
                transitions.action,
                transitions.reward,
                transitions.next_observation,
                factor.astype(np.float32),
            )
        rows: list[Rows] = []
        window, robots = self._windows.get(source), len(step.phase)
        if window is None or self._incarnations[source] != step.incarnation or len(window.count) != robots:
            if window is not None:  # what its robots did before will never go on
                rows += self._take(window, np.arange(len(window.count)))
            window = self._windows[source] = self._empty(robots)
            self._incarnations[source] = step.incarnation
        who = transitions.robot
        episode, episode_step = step.episode[who], step.episode_step[who]
        goes_on = (window.episode[who] == episode) & (window.episode_step[who] + np.uint32(1) == episode_step)
        broken = who[(window.count[who] > 0) & ~goes_on]
        rows += self._take(window, broken)

        last = window.count[who]
        window.observation[who, last], window.action[who, last] = transitions.observation, transitions.action
        window.reward[who, last], window.next_observation[who] = transitions.reward, transitions.next_observation
        window.episode[who], window.episode_step[who] = episode, episode_step
        window.count[who] += 1

        over = step.phase[who] >= Phase.TERMINATED
        rows += self._take(window, who[over], transitions.terminated[over])
        full = who[~over & (window.count[who] == self.steps)]
        rows.append(self._rows(window, full, False, oldest=True))
        for array in (window.observation, window.action, window.reward):
            array[full, :-1] = array[full, 1:]
        window.reward[full, -1] = 0
        window.count[full] -= 1
        return Rows(*map(np.concatenate, zip(*rows, strict=True)))

    def end(self) -> Rows:
        """The rows of all that waits, of every source: nothing of it will go on, as after a gap."""
        rows = [self._rows(self._empty(0), np.arange(0), False)]
        for window in self._windows.values():
            rows += self._take(window, np.arange(len(window.count)))
        self._windows, self._incarnations = {}, {}
        return Rows(*map(np.concatenate, zip(*rows, strict=True)))

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """A copy of all transitions that wait for further ones: arrays, and scalars fit for JSON."""
        arrays = {
            f"{source}/{item.name}": getattr(window, item.name).copy()
            for source, window in self._windows.items()
            for item in fields(window)
        }
        return arrays, {"steps": self.steps, "incarnations": dict(self._incarnations)}

    def restore(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`.

        Raises:
            BundleError: the state is incomplete, damaged or of another n; nothing has changed then.
        """
        windows: dict[str, _Window] = {}
        try:
            if scalars["steps"] != self.steps:
                raise BundleError(f"the checkpoint has n_step {scalars['steps']}; this learner has {self.steps}")
            incarnations = {str(source): int(value) for source, value in scalars["incarnations"].items()}
            for source in incarnations:
                window = self._empty(len(arrays[f"{source}/count"]))
                for item in fields(window):
                    saved, expected = arrays[f"{source}/{item.name}"], getattr(window, item.name)
                    if saved.shape != expected.shape or saved.dtype != expected.dtype:
                        raise ValueError(f"{item.name} is {saved.dtype}{list(saved.shape)}")
                    expected[:] = saved
                if window.count.min(initial=0) < 0 or window.count.max(initial=0) >= self.steps:
                    raise ValueError(f"count is {window.count.tolist()[:8]}")
                windows[source] = window
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"state of n-step returns: {type(error).__name__} {error}") from None
        self._windows, self._incarnations = windows, incarnations

    def _empty(self, robots: int) -> _Window:
        o, a = self._sizes
        return _Window(
            np.zeros(robots, np.uint64),
            np.zeros(robots, np.uint32),
            np.zeros(robots, np.int64),
            np.zeros((robots, self.steps, o), np.float32),
            np.zeros((robots, self.steps, a), np.float32),
            np.zeros((robots, self.steps)),
            np.zeros((robots, o), np.float32),
        )

    def _take(
        self, window: _Window, robots: NDArray[np.intp], terminated: NDArray[np.bool_] | bool = False
    ) -> list[Rows]:
        """Rows of all that these robots have, which ends here."""
        if not len(robots):
            return []
        rows = self._rows(window, robots, terminated)
        window.count[robots], window.reward[robots] = 0, 0
        return [rows]

    def _rows(
        self,
        window: _Window,
        robots: NDArray[np.intp],
        terminated: NDArray[np.bool_] | bool,
        *,
        oldest: bool = False,
    ) -> Rows:
        """Rows that begin at each transition of these robots, or at the oldest alone, and end with the newest."""
        returns = np.zeros((len(robots), self.steps + 1))
        for position in reversed(range(self.steps)):
            returns[:, position] = window.reward[robots, position] + self.discount * returns[:, position + 1]
        counts = window.count[robots]
        index, first = np.nonzero(np.arange(self.steps) < (np.minimum(counts, 1) if oldest else counts)[:, None])
        who = robots[index]
        factor = self.discount ** (counts[index] - first) * ~np.broadcast_to(terminated, counts.shape)[index]
        return Rows(
            window.observation[who, first],
            window.action[who, first],
            returns[index, first].astype(np.float32),
            window.next_observation[who],
            factor.astype(np.float32),
        )
