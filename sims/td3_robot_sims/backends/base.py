"""Base classes of simulator backends and of their environments.

To add a simulator, write two classes and register the backend:

* a subclass of :class:`Environment` simulates one robot;
* a subclass of :class:`Backend` describes the tasks of one engine and makes their environments;
* a row in ``td3_robot_sims.tasks.BACKENDS``, or an entry point of an installed package, registers the backend.

``tests/contract/simulator_backend.py`` tests a backend against the rules of this module.

In the shapes of arrays, O is the number of a robot's observation channels, and A the number of its action channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from td3_robot.config.randomization import OUTSIDE_PHYSICS, RandomizationConfig
from td3_robot.errors import BundleError, ConfigError
from td3_robot.specs import FLOAT32_MAX, Float32, RobotSpec
from td3_robot_sims.backends import results, saved_episode
from td3_robot_sims.backends.disturbance import Disturbance


def _is_allowed(action: Float32) -> bool:
    """Whether an action is finite, and the sum of its squares fits into float32."""
    values: list[float] = action.tolist()
    # Use Python's sum(): dot() would release the interpreter lock, and @ would warn about an overflow.
    return sum(value * value for value in values) <= FLOAT32_MAX


class Outcome(NamedTuple):
    """The result of one step.

    Attributes:
        observation: float32[O], in the units of the task's specification.
        reward: a finite number, unless the physics diverged.
        terminated: the task itself ended the episode, so no reward follows.
        truncated: the time limit cut the episode short, or the task did so for another reason. ``terminated``
            and ``truncated`` can both be True.
    """

    observation: Float32
    reward: float
    terminated: bool
    truncated: bool


class Environment(ABC):
    """One robot in one world.

    A subclass implements :meth:`_reset` and :meth:`_step`. This class checks actions and results, and applies the time
    limit and the randomization that needs no physics. It also saves and restores the episode.

    Args:
        time_limit: steps after which an episode is truncated; 0 for no limit.
        seed: seed of the random stream, at least 0; None for a seed from the operating system.
        randomization: the ranges of the values to draw at each reset; None for no randomization.
        groups: the group of each observation channel, see :class:`td3_robot.config.randomization.SensorsConfig`; None
            for a robot without named groups.

    Attributes:
        task_name: the name of the task in errors. :func:`td3_robot_sims.tasks.make` sets it to the full name. Before
            that, it is the name of the robot.
        concurrent: True if several threads can step environments of this class at the same time, and this is faster
            than one thread.
        random: the random generator of resets and steps.
        disturbance: the randomization of this robot; None if nothing is randomized.
    """

    concurrent = False

    def __init__(
        self,
        spec: RobotSpec,
        time_limit: int,
        seed: int | None = None,
        randomization: RandomizationConfig | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        self.spec = spec
        self.task_name = spec.name
        self.time_limit = time_limit
        self.disturbance: Disturbance | None = None
        if randomization is not None and randomization.on:
            self.disturbance = Disturbance(randomization, spec, groups or ["all"] * spec.observation_size)
        self.random = np.random.default_rng(seed)
        self._terms: dict[str, float] = {}
        self._reward = 0.0
        self._start: NDArray[np.uint64] | None = None  # the random state before the reset that began this episode
        self._running = False
        self._action_shape = (spec.action_size,)
        self._observation_shape = (spec.observation_size,)
        self._actions: list[Float32] = []  # all actions of the episode, as step() received them
        self._observation = np.zeros(spec.observation_size, np.float32)

    @property
    def length(self) -> int:
        """The number of steps of the episode so far."""
        return len(self._actions)

    @property
    def world(self) -> Mapping[str, float]:
        """The values drawn for this episode, by name; empty if nothing is randomized."""
        return self.disturbance.world if self.disturbance else {}

    def reset(self, seed: int | None = None) -> Float32:
        """Start an episode. Return the first observation, float32[O].

        Args:
            seed: new seed of the random stream, at least 0; None to continue the stream.

        Raises:
            NodeError: :meth:`_reset` returned something other than an observation, or called ``sys.exit``.
        """
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self._start = saved_episode.pack_random(self.random)
        self._running = False  # if the reset fails, no episode is running
        self._actions = []
        self._terms = {}
        if self.disturbance:
            self.disturbance.begin(self.random)
        try:
            first = self._reset()
        except SystemExit as end:
            raise results.ended(self.task_name, "reset", end) from end
        observation = results.observation(self.task_name, first, self._observation_shape)
        self._observation = self.disturbance.sensed(observation) if self.disturbance else observation
        self._running = True
        return self._observation.copy()

    def step(self, action: Float32) -> Outcome:
        """Apply ``action``, float32[A], for one control period.

        Raises:
            RuntimeError: no episode is running. Call reset before the first step, and after the end of an episode.
            ValueError: the action has the wrong shape, is not finite, or the sum of its squares is too large for
                float32.
            NodeError: :meth:`_step` did not return the fields of an :class:`Outcome`, or called ``sys.exit``.
        """
        if not self._running:
            raise RuntimeError(f"{self.spec.name}: no episode is running; call reset() first")
        action = np.array(action, np.float32)  # a copy, because the caller may reuse its array
        if action.shape != self._action_shape:
            raise ValueError(f"{self.spec.name}: the action has shape {action.shape}; it must be {self._action_shape}")
        if not _is_allowed(action):
            raise ValueError(f"{self.spec.name}: action {action.tolist()} is not finite, or is too large")
        # Store the action without a delay: restore_state() passes it to step() again, and step() adds the delay.
        self._actions.append(action)
        try:
            result = self._step(self.disturbance.delayed(action) if self.disturbance else action)
        except SystemExit as end:
            raise results.ended(self.task_name, "step", end) from end
        values = results.fields(self.task_name, "_step", result, results.STEP)
        observation, reward, terminated, truncated = results.outcome(self.task_name, values, self._observation_shape)
        if self.disturbance:
            observation = self.disturbance.sensed(observation)
        truncated = truncated or 0 < self.time_limit <= len(self._actions)
        self._running = not (terminated or truncated)
        self._observation, self._reward = observation, reward
        # Return a copy, because the caller may write into it and the saved observation must not change.
        return Outcome(observation.copy(), reward, terminated, truncated)

    @abstractmethod
    def _reset(self) -> Float32:
        """Start an episode with random numbers from ``self.random``. Return the first observation, float32[O]."""

    @abstractmethod
    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        """Apply a checked action, float32[A], and do not change its array. Return the fields of an :class:`Outcome`.

        If the reward is a sum, store its terms in ``self._terms``.
        """

    def reward_terms(self) -> dict[str, float]:
        """Return the terms whose sum is the reward of the last step, by name; empty before an episode's first step.

        Raises:
            NodeError: a term is not a number.
        """
        if not self._actions:
            return {}
        terms = {name: results.number(self.task_name, f"term {name!r}", term) for name, term in self._terms.items()}
        return terms or {"reward": self._reward}

    def save_state(self) -> dict[str, Any]:
        """Save the episode: the random state before its reset, its k actions so far and its newest observation.

        Before the first episode, this saves the current random state.

        Returns:
            ``{"random": uint64[6], "started": bool, "actions": float32[k, A], "observation": float32[O]}``
        """
        return {
            "random": saved_episode.pack_random(self.random) if self._start is None else self._start.copy(),
            "started": self._start is not None,
            "actions": np.array(self._actions, np.float32).reshape(-1, *self._action_shape),
            "observation": self._observation.copy(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Repeat all actions of a saved episode. Later steps are bit for bit the same as in a run without a restart.

        Few engines save their whole state: PyBullet omits contact caches and solver impulses, and most Gymnasium tasks
        save nothing. So this method repeats the actions.

        Raises:
            BundleError: the state is damaged or belongs to another task, or the repeated episode gives a different
                observation. After this error, call reset before the next step.
        """
        where = f"saved state of {self.spec.name}"
        if state.keys() != {"random", "started", "actions", "observation"}:
            raise BundleError(f"{where}: it must hold exactly the keys 'random', 'started', 'actions', 'observation'")
        words = saved_episode.array(state, "random", np.uint64, (6,), where)
        count = getattr(state["actions"], "shape", (0,))[:1]
        actions = saved_episode.array(state, "actions", np.float32, (*count, *self._action_shape), where)
        observation = saved_episode.array(state, "observation", np.float32, self._observation.shape, where)
        if not all(map(_is_allowed, actions)):
            raise BundleError(f"{where}: an action is not finite, or is too large")
        saved_episode.unpack_random(words, self.random)
        self._start, self._running, self._actions = None, False, []
        if not state["started"]:
            return
        self.reset()
        for action in actions:
            if not self._running:
                break
            self.step(action)
        if len(self._actions) != len(actions) or not np.array_equal(self._observation, observation, equal_nan=True):
            self._running = False
            raise BundleError(
                f"{where}: its {len(actions)} actions do not lead to the saved observation; one of these has "
                "changed: the simulator's version, numpy's version, the processor or the randomization"
            )

    def render(self, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        """Return a picture of the robot, uint8[height, width, 3], in RGB. This does not change the simulation.

        Raises:
            ConfigError: the task has no pictures.
        """
        del width, height
        raise ConfigError(f"task {self.task_name!r} cannot be drawn: its environment has no pictures")

    def close(self) -> None:
        """Free the world; a second call does nothing."""
        self._running = False


class Backend(ABC):
    """The tasks of one simulation engine.

    A task is named ``KIND:NAME``, or only ``NAME`` for the kind ``bullet``. The methods take NAME. The module of a
    backend must not import the engine, so that listing tasks stays fast.

    Attributes:
        kind: the name of the backend.
        packages: installed Python packages that the tasks need, and whose versions affect the results.
        randomization: keys of the configuration's ``randomization`` section that the tasks support; None for all keys.
    """

    packages: tuple[str, ...] = ("numpy",)
    randomization: Collection[str] | None = OUTSIDE_PHYSICS

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def names(self) -> Sequence[str]:
        """Return the names of all tasks; empty if the engine cannot list them."""
        return ()

    @abstractmethod
    def spec(self, name: str) -> RobotSpec:
        """Return the robot specification of a task. If possible, do not start a simulation for this.

        Raises:
            ConfigError: the task does not exist, is not supported, or needs a package that is not installed.
        """

    @abstractmethod
    def make(self, name: str, seed: int | None, randomization: RandomizationConfig | None) -> Environment:
        """Make an environment, see :class:`Environment`. Raises the same ConfigError as :meth:`spec`."""

    def module(self, name: str) -> str:
        """Return the Python module that :meth:`make` imports, for example ``mine`` for ``mine:Endless-v0``.

        The result is empty if :meth:`make` imports no module.
        """
        del name
        return ""

    def gymnasium_id(self, name: str) -> str | None:
        """Return the task's ID for ``gymnasium.make``, or None if Gymnasium has no such task.

        If Gymnasium does not know the ID yet, this method must register the ID.
        """
        del name
        return None

    def check_randomization(self, config: RandomizationConfig) -> None:
        """Check the randomization. Raises ConfigError if it sets a key that the backend does not support."""
        for key, values in config.ranges().items():
            if self.randomization is not None and key not in self.randomization:
                raise ConfigError(
                    f"randomization.{key} is {list(values)}; the backend {self.kind!r} of the task "
                    f"supports only the keys: {', '.join(self.randomization)}"
                )
