"""What every task offers, whether it runs in PyBullet or comes from Gymnasium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from td3_robot.specs import Float32, RobotSpec


class Outcome(NamedTuple):
    """What a step led to. ``terminated`` and ``truncated`` are both true when a robot fails at its time limit.

    Attributes:
        observation: float32[O], in the units of the task's specification.
        reward: a finite number, unless physics itself failed.
        terminated: the episode ended by what happened in it: no return follows.
        truncated: the time limit ended the episode.
    """

    observation: Float32
    reward: float
    terminated: bool
    truncated: bool


class Environment(Protocol):
    """One robot in one world.

    Attributes:
        spec: names, units and ranges of observations and actions, and the control period.
        time_limit: steps after which an episode is truncated; 0 where the task has no limit.
        concurrent: whether it may be stepped and reset while others of its kind are, in other threads, and gains by it.
        world: what was drawn for the running episode, name to number, see
            :class:`~td3_robot_sims.backends.disturbance.Disturbance`; empty where nothing is randomized.
    """

    spec: RobotSpec
    time_limit: int
    concurrent: bool

    @property
    def world(self) -> Mapping[str, float]: ...

    def reset(self, seed: int | None = None) -> Float32:
        """Start an episode and return its first observation, float32[O]; a seed (>= 0) restarts the random stream."""

    def step(self, action: Float32) -> Outcome:
        """Apply ``action``, float32[A], for one control period.

        Raises:
            RuntimeError: no episode is running: before the first reset, after the end of one, or after close.
            ValueError: the action has another shape, or is not finite.
        """

    def reward_terms(self) -> dict[str, float]:
        """The terms whose sum was the last step's reward; empty before the first step of an episode."""

    def save_state(self) -> dict[str, Any]:
        """All that decides what follows, as ``{"random": uint64[6], "started": bool, "actions": float32[k, A],
        "observation": float32[O]}``."""

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Return to a saved state, of this or another instance or process: what follows is bit for bit the same.

        Takes as long as the steps of the episode so far did: it repeats them.

        Raises:
            BundleError: the state is not one of this task, or leads elsewhere with the software installed here; a
                reset is then needed before the next step.
        """

    def render(self, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        """A picture of the robot, uint8[height, width, 3], red-green-blue. Changes nothing that is simulated."""

    def close(self) -> None:
        """Free the world; a second call does nothing."""
