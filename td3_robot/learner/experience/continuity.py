"""Checks whether a robot's step follows its last one: in the same process and episode, with the next step number."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.messages import Step

Bools = NDArray[np.bool_]
UInt64 = NDArray[np.uint64]
UInt32 = NDArray[np.uint32]


def follows(episode: UInt64, episode_step: UInt32, next_episode: UInt64, next_step: UInt32) -> Bools:
    """bool[N]: whether each robot's next position is one step after the first, in the same episode."""
    continues: Bools = (next_episode == episode) & (next_step == episode_step + np.uint32(1))
    return continues


@dataclass(eq=False)
class Positions:
    """The position of each robot of a source at its newest transition. Subclasses add the data that they collect.

    Attributes:
        incarnation: of the source.
        episode: uint64[N].
        episode_step: uint32[N].
    """

    incarnation: int
    episode: UInt64
    episode_step: UInt32

    def belong_to(self, step: Step) -> bool:
        """Whether a Step comes from the same process, with the same number of robots."""
        return self.incarnation == step.incarnation and len(self.episode) == len(step.episode)

    def advance(self, robots: NDArray[np.intp], step: Step) -> Bools:
        """Move robots to their positions in a Step.

        Returns:
            bool[M]: whether each robot's newest transition follows its last one without a gap.
        """
        episode, episode_step = step.episode[robots], step.episode_step[robots]
        continues = follows(self.episode[robots], self.episode_step[robots], episode, episode_step)
        self.episode[robots], self.episode_step[robots] = episode, episode_step
        return continues

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name, without copying them."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "incarnation"}
