"""Loss-adjusted prioritised replay, LAP (Fujimoto, Meger and Precup 2020). It uses a sum tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import ConfigError
from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.learner.resources import BRANCHES, tree_levels
from td3_robot.specs import Float64

Indices = NDArray[np.int64]

_LARGEST_ERROR = 1e12  # this limit keeps sums finite until the learner detects divergence


class SumTree:
    """A tree with ``capacity`` weights as leaves. Each inner node is the sum of its 32 children.

    After a change, the tree computes each affected sum from all its children. So rounding errors do not accumulate, and
    equal leaves give bitwise equal sums.

    Attributes:
        leaves: float64[at least capacity], the weights. :meth:`set` also updates the sums.
    """

    def __init__(self, capacity: int) -> None:
        self._levels = [np.zeros(size) for size in tree_levels(capacity)]
        self._before = np.zeros(len(self._levels[0]) + 1)  # for each top-level node, the sum of the nodes before it
        self.leaves = self._levels[-1]

    def set(self, leaves: Indices | slice, weights: Float64 | float) -> None:
        """Give leaves new weights, at least 0. If a leaf occurs twice, it gets its last weight."""
        self.leaves[leaves] = weights
        for below, above in zip(self._levels[:0:-1], self._levels[-2::-1], strict=True):
            children = below.reshape(-1, BRANCHES)
            if isinstance(leaves, slice) or len(leaves) * BRANCHES > len(self.leaves):  # computing all sums is faster
                above[: len(children)] = children.sum(1)
            else:
                leaves = leaves // BRANCHES
                above[leaves] = children[leaves].sum(1)
        np.cumsum(self._levels[0], out=self._before[1:])

    def find(self, fractions: Float64) -> Indices:
        """For each fraction in [0, 1), find the first leaf at which the running sum exceeds fraction · total.

        Because of rounding, the result can be a leaf after the last leaf with a positive weight.
        """
        rest = fractions * self._before[-1]
        found: Indices = np.minimum(self._before.searchsorted(rest, "right"), len(self._levels[0])) - 1
        rest -= self._before[found]
        for level in self._levels[1:]:
            children = torch.from_numpy(level.reshape(-1, BRANCHES)[found])
            sums = children.cumsum_(1).numpy()  # five times as fast as numpy's cumsum
            branch = np.minimum((sums <= rest[:, None]).sum(1), BRANCHES - 1)
            sums[:, -1] = 0.0  # the next line reads column -1 for branch 0: no child comes before it
            rest -= sums[np.arange(len(rest)), branch - 1]
            found = found * BRANCHES + branch
        return found


class PrioritisedReplay(ReplayBuffer):
    """The newest ``capacity`` transitions, drawn with replacement in proportion to their priorities.

    The priority of a transition is max(|δ|, 1) to the power α. |δ| is the largest absolute TD error of the critics when
    the transition was last sampled. A new transition gets the greatest priority so far. With the Huber loss, LAP needs
    no importance weights: LAP has the same mean gradient as uniform sampling with another loss. The paper calls this
    other loss PAL.

    Args:
        exponent: α, 0 (uniform) to 1.
    """

    def __init__(
        self,
        capacity: int,
        observation_size: int,
        action_size: int,
        seed: int,
        exponent: float,
        storage: Callable[[int, int], Storage] = Storage,
    ) -> None:
        super().__init__(capacity, observation_size, action_size, seed, storage)
        self.exponent = exponent
        self._greatest = 1.0
        self._tree = SumTree(capacity)
        self._drawn: Indices = np.zeros(0, np.int64)

    @property
    def priorities(self) -> Float64:
        """float64[len(self)], in the order of the rows."""
        return self._tree.leaves[: len(self)]

    def _stored(self, since: int) -> None:
        super()._stored(since)
        new = np.arange(max(since, self.total_added - self.capacity), self.total_added) % self.capacity
        self._tree.set(new, self._greatest)

    def _draw(self, batch_size: int) -> Indices:
        self._drawn = np.minimum(self._tree.find(self._random.random(batch_size)), len(self) - 1)
        return self._drawn

    def learned(self, errors: Sequence[Tensor]) -> None:
        if not errors:
            raise ConfigError(
                "learner.replay is 'lap', but learner.algorithm gives no TD errors; learner.replay must be 'uniform'"
            )
        size = np.max([error[:, 0].abs().cpu().numpy() for error in errors], 0).astype(np.float64)
        priorities = np.fmin(np.fmax(size, 1.0), _LARGEST_ERROR) ** self.exponent
        self._tree.set(self._drawn[: len(priorities)], priorities)
        self._greatest = max(self._greatest, float(priorities.max()))

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays, scalars = super().state()
        return {**arrays, "priorities": self.priorities.copy()}, {**scalars, "greatest_priority": self._greatest}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        super().restore(arrays, scalars)
        priorities, greatest = arrays["priorities"], float(scalars["greatest_priority"])
        sound = (priorities >= 1) & np.isfinite(priorities)
        if priorities.shape != (len(self),) or not sound.all() or not 1 <= greatest < np.inf:
            raise ValueError(
                f"the priorities must be {len(self)} finite numbers, and greatest_priority must be one finite number; "
                "all these numbers must be at least 1"
            )
        self._greatest = greatest
        self._tree.leaves[:] = 0
        self._tree.set(slice(len(self)), priorities)
