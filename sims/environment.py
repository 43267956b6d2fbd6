"""What every task offers, whether it runs in PyBullet or comes from Gymnasium, and how its state is saved.

States are saved as what led to them: the random generator at the start of the episode and the actions since. PyBullet
cannot restore everything it computes with (contact caches and solver impulses among them), and most Gymnasium tasks
save nothing at all; but all of them give the same numbers again for the same start and the same actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import BundleError
from td3_robot.specs import Float32, RobotSpec

_MASK = 2**64 - 1


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
    """

    spec: RobotSpec
    time_limit: int

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

        Takes as long as the steps of the episode so far.

        Raises:
            BundleError: the state is not one of this task, or leads elsewhere with the software installed here.
        """

    def render(self, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        """A picture of the robot, uint8[height, width, 3], red-green-blue. Changes nothing that is simulated."""

    def close(self) -> None:
        """Free the world; a second call does nothing."""


class Episode:
    """The running episode's part of a saved state: the random state it started from, and its actions.

    Attributes:
        random: uint64[6], the generator before the reset; see :func:`pack_random`.
        running: steps are accepted.
        length: steps taken.
    """

    def __init__(self, action_size: int, capacity: int) -> None:
        self.random = np.zeros(6, np.uint64)
        self.running = False
        self.started = False
        self.length = 0
        self._actions = np.zeros((capacity, action_size), np.float32)

    def start(self, random: NDArray[np.uint64]) -> None:
        self.random = random
        self.running = self.started = True
        self.length = 0

    def add(self, action: Float32) -> None:
        if self.length == len(self._actions):  # only tasks without a time limit outgrow their capacity
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)])
        self._actions[self.length] = action
        self.length += 1

    def actions(self) -> Float32:
        """float32[length, A], a copy."""
        return self._actions[: self.length].copy()


def pack_random(generator: np.random.Generator) -> NDArray[np.uint64]:
    """The state of a PCG64 generator as uint64[6]: its two 128-bit numbers, high half first, and the spare 32 bits."""
    state: Any = generator.bit_generator.state
    number, increment = int(state["state"]["state"]), int(state["state"]["inc"])
    words = [number >> 64, number & _MASK, increment >> 64, increment & _MASK, state["has_uint32"], state["uinteger"]]
    return np.array(words, np.uint64)


def unpack_random(words: NDArray[np.uint64], generator: np.random.Generator) -> None:
    """Put a state from :func:`pack_random` into ``generator``."""
    a, b, c, d, has_spare, spare = (int(word) for word in words)
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": a << 64 | b, "inc": c << 64 | d},
        "has_uint32": has_spare,
        "uinteger": spare,
    }


class SavedState(NamedTuple):
    """A saved state whose types and shapes have been checked."""

    random: NDArray[np.uint64]
    started: bool
    actions: Float32
    observation: Float32


def check_state(state: Mapping[str, Any], spec: RobotSpec) -> SavedState:
    """The content of a saved state.

    Raises:
        BundleError: a part is missing, or has another type or shape than ``spec`` asks for.
    """
    where = f"saved state of {spec.name}"
    wanted = {"random", "started", "actions", "observation"}
    if not isinstance(state, Mapping) or set(state) != wanted:
        raise BundleError(f"{where}: it must hold {', '.join(sorted(wanted))}")
    arrays = {}
    for key, dtype, shape in (
        ("random", np.uint64, (6,)),
        ("actions", np.float32, (None, spec.action_size)),
        ("observation", np.float32, (spec.observation_size,)),
    ):
        array = np.asarray(state[key])
        fits = array.ndim == len(shape) and all(b is None or a == b for a, b in zip(array.shape, shape, strict=True))
        if array.dtype != dtype or not fits:
            raise BundleError(f"{where}: {key} is {array.dtype}{list(array.shape)}; it must be {dtype.__name__}{shape}")
        arrays[key] = array
    if not np.isfinite(arrays["actions"]).all():
        raise BundleError(f"{where}: an action is not finite")
    return SavedState(arrays["random"], bool(state["started"]), arrays["actions"], arrays["observation"])


def leads_elsewhere(spec: RobotSpec, steps: int) -> BundleError:
    """The error for a replay that did not arrive at the saved observation."""
    return BundleError(
        f"saved state of {spec.name}: replaying its {steps} actions gives another observation here; "
        "it was saved with another simulator version, numpy or processor"
    )
