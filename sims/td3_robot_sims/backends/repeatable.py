"""Saving an environment as what led to its state: the random generator as the episode began, and the actions since.

PyBullet cannot restore everything it computes with (contact caches and solver impulses among them), and most tasks of
Gymnasium save nothing at all. But each gives the same numbers again for the same start and the same actions, so that
repeating an episode restores it to the last bit. What cannot be repeated is refused: the last observation must come out
as it was saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import BundleError
from td3_robot.specs import Float32, RobotSpec
from td3_robot_sims.backends.disturbance import Disturbance
from td3_robot_sims.backends.environment import Outcome

_MASK = 2**64 - 1
_LARGEST = float(np.finfo(np.float32).max)
_FIRST_CAPACITY = 1000  # actions that an episode without a time limit has room for at first


class Repeatable(ABC):
    """The part that environments share: the random stream, the episode's actions, and saving by repeating them.

    Attributes:
        spec, time_limit, concurrent: see :class:`td3_robot_sims.backends.environment.Environment`.
        random: the stream that resets, and some tasks' steps, draw from.
        length: steps of the episode so far.
        disturbance: what a randomized world does; None where nothing is randomized.
    """

    concurrent = False

    def __init__(
        self,
        spec: RobotSpec,
        time_limit: int,
        seed: int | None,
        randomization: RandomizationConfig | None = None,
        walker: bool = False,
    ) -> None:
        self.spec = spec
        on = randomization is not None and randomization.on
        self.disturbance = Disturbance(randomization, spec, walker) if randomization and on else None
        self.time_limit = time_limit
        self.random, _ = seeding.np_random(seed)
        self.length = 0
        self._start: NDArray[np.uint64] | None = None  # the random state before the running episode's reset
        self._running = False
        self._actions = np.zeros((time_limit or _FIRST_CAPACITY, spec.action_size), np.float32)
        self._shape = (spec.action_size,)
        self._observation = np.zeros(spec.observation_size, np.float32)

    def reset(self, seed: int | None = None) -> Float32:
        if seed is not None:
            self.random, _ = seeding.np_random(seed)
        self._start = pack_random(self.random)
        self._running = True
        self.length = 0
        if self.disturbance:
            self.disturbance.begin(self.random)
            self._observation = self.disturbance.sensed(self._reset())
        else:
            self._observation = self._reset()
        return self._observation.copy()

    @property
    def world(self) -> Mapping[str, float]:
        return self.disturbance.world if self.disturbance else {}

    def step(self, action: Float32) -> Outcome:
        if not self._running:
            raise RuntimeError(f"{self.spec.name}: no episode is running; call reset() first")
        action = np.asarray(action, np.float32)
        if action.shape != self._shape:
            raise ValueError(f"{self.spec.name}: the action has shape {action.shape}; it must be {self._shape}")
        # Neither dot(), which lets threads change over, nor @, which warns where it overflows.
        if not sum(value * value for value in action.tolist()) <= _LARGEST:
            raise ValueError(f"{self.spec.name}: action {action.tolist()} is not finite, or its square is not")
        self._remember(action)
        if self.disturbance:
            # What is remembered above, and repeated to restore, is the action as it was sent.
            truth, reward, terminated, truncated = self._step(self.disturbance.delayed(self._actions[self.length - 1]))
            observation = self.disturbance.sensed(truth)
        else:
            observation, reward, terminated, truncated = self._step(action)
        truncated = truncated or (self.time_limit > 0 and self.length >= self.time_limit)
        self._running = not (terminated or truncated)
        self._observation = observation
        # The caller's to keep: what is saved must not change with it.
        return Outcome(observation.copy(), reward, terminated, truncated)

    @abstractmethod
    def _reset(self) -> Float32:
        """Start an episode, drawing from ``random``; the first observation, float32[O]."""

    @abstractmethod
    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        """Apply a checked action, float32[A], without writing into it; returns what an ``Outcome`` holds.

        The time limit is not this method's to tell.
        """

    def _remember(self, action: Float32) -> None:
        if self.length == len(self._actions):
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)])
        self._actions[self.length] = action
        self.length += 1

    def save_state(self) -> dict[str, Any]:
        started = self._start is not None
        return {
            "random": pack_random(self.random) if self._start is None else self._start.copy(),
            "started": started,
            "actions": self._actions[: self.length].copy(),
            "observation": self._observation.copy(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        saved = check_state(state, self.spec)
        unpack_random(saved.random, self.random)
        self._start, self._running, self.length = None, False, 0
        if not saved.started:
            return
        self.reset()
        for action in saved.actions:
            if not self._running:
                break
            self.step(action)
        if self.length != len(saved.actions) or not np.array_equal(
            self._observation, saved.observation, equal_nan=True
        ):
            self._running = False
            raise _leads_elsewhere(self.spec, len(saved.actions))

    def close(self) -> None:
        self._running = False


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
        array = state[key]
        if not isinstance(array, np.ndarray):
            raise BundleError(f"{where}: {key} is {type(array).__name__}; it must be an array")
        fits = array.ndim == len(shape) and all(b is None or a == b for a, b in zip(array.shape, shape, strict=True))
        if array.dtype != dtype or not fits:
            raise BundleError(f"{where}: {key} is {array.dtype}{list(array.shape)}; it must be {dtype.__name__}{shape}")
        arrays[key] = array
    *_, increment, has_spare, spare = (int(word) for word in arrays["random"])
    if increment % 2 == 0 or has_spare > 1 or spare >= 2**32:
        raise BundleError(f"{where}: random is no state of a PCG64 generator")
    if not np.isfinite(arrays["actions"]).all():
        raise BundleError(f"{where}: an action is not finite")
    return SavedState(arrays["random"], bool(state["started"]), arrays["actions"], arrays["observation"])


def _leads_elsewhere(spec: RobotSpec, steps: int) -> BundleError:
    """The error for a replay that did not arrive at the saved observation."""
    return BundleError(
        f"saved state of {spec.name}: replaying its {steps} actions gives another observation here; "
        "it was saved with another simulator version, numpy or processor, or randomized otherwise"
    )
