"""Splits the Steps of a recording into the episodes of single robots. A missing Step ends an episode."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from td3_robot.learner.experience.transitions import Assembler
from td3_robot.messages import Phase, Step
from td3_robot.specs import Float32


@dataclass(frozen=True, eq=False)
class Episode:
    """T consecutive transitions of one robot with O observation channels and A action channels. T is at least 1.

    Attributes:
        steps: the T + 1 Steps of these transitions.
        robot: index of the robot in the arrays of the Steps.
    """

    steps: tuple[Step, ...]
    robot: int

    @property
    def source(self) -> str:
        return self.steps[0].source

    @property
    def incarnation(self) -> int:
        return self.steps[0].incarnation

    @property
    def number(self) -> int:
        """The number of the episode. For each robot and incarnation of a source, the first number is 0."""
        return int(self.steps[0].episode[self.robot])

    @property
    def begun(self) -> bool:
        """Whether ``steps`` begin with the first Step of the episode (phase FIRST)."""
        return bool(self.steps[0].phase[self.robot] == Phase.FIRST)

    @property
    def end(self) -> Phase | None:
        """How the episode ended: TERMINATED or TRUNCATED.

        ``end`` is None if the episode's last Step is not in ``steps``.
        """
        phase = Phase(self.steps[-1].phase[self.robot])
        return phase if phase >= Phase.TERMINATED else None

    @property
    def whole(self) -> bool:
        return self.begun and self.end is not None

    @property
    def observation(self) -> Float32:
        """float32[T + 1, O]."""
        return np.stack([step.observation[self.robot] for step in self.steps])

    @property
    def action(self) -> Float32:
        """float32[T, A]: the applied actions, in the units of their channels."""
        return np.stack([step.action[self.robot] for step in self.steps[1:]])

    @property
    def reward(self) -> Float32:
        """float32[T]."""
        return np.array([step.reward[self.robot] for step in self.steps[1:]], np.float32)

    @property
    def identity(self) -> dict[str, NDArray[np.int64]]:
        """int64[T + 1] arrays by name. They identify the Steps and the origin of their actions."""
        names = ("sequence", "stamp", "weights_version", "noise_kind")
        identity = {name: np.array([getattr(step, name) for step in self.steps], np.int64) for name in names}
        identity["origin"] = np.array([step.origin_of(self.robot) for step in self.steps], np.int64)
        return {**identity, "episode_step": np.array([s.episode_step[self.robot] for s in self.steps], np.int64)}

    @property
    def world(self) -> dict[str, float]:
        """The randomized parameters of this episode, by name.

        ``world`` is empty if nothing was randomized, or if the episode's first Step is not in ``steps``.
        """
        return dict(self.steps[0].world.get(str(self.robot), {})) if self.begun else {}


class Episodes:
    """Splits the Steps of any number of sources into episodes, with the learner's rules for consecutive Steps."""

    def __init__(self) -> None:
        # For each robot, the number of Steps that belong to no transition and to no Episode of this robot; summed over
        # the robots.
        self._alone = 0
        self._assemblers: dict[str, Assembler] = {}
        self._open: dict[tuple[str, int], list[Step]] = {}

    def add(self, step: Step) -> list[Episode]:
        """Take a Step. Returns the episodes that this Step ends."""
        joined = self._assemblers.setdefault(step.source, Assembler()).add(step)
        if joined is None:
            return []
        over: list[Episode] = []
        follow = set(joined.robot.tolist())
        for robot, phase in enumerate(step.phase):
            if robot in follow:
                self._open[step.source, robot].append(step)
            else:
                over += self._close(step.source, robot)
                self._open[step.source, robot] = [step]
            if phase >= Phase.TERMINATED:
                over += self._close(step.source, robot)
        return over

    def finish(self) -> list[Episode]:
        """Close and return the episodes whose ends are not recorded."""
        return [episode for source, robot in list(self._open) for episode in self._close(source, robot)]

    def lost(self) -> Counter[str]:
        """Counts of ``missed`` Steps, ``gaps`` (places with missed Steps), ``late`` Steps and ``alone`` Steps.

        For a robot, a Step is ``alone`` if the Step belongs to no transition of this robot. ``alone`` is the number of
        these Steps, summed over the robots.
        """
        total = Counter(alone=self._alone)
        for assembler in self._assemblers.values():
            total += Counter({name: assembler.counters[name] for name in ("missed", "gaps", "late")})
        return +total

    def _close(self, source: str, robot: int) -> list[Episode]:
        steps = self._open.pop((source, robot), [])
        self._alone += len(steps) == 1
        return [Episode(tuple(steps), robot)] if len(steps) > 1 else []
