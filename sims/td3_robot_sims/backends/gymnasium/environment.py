"""Gymnasium's tasks as environments of this project."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import USER_CODE, ConfigError
from td3_robot.specs import Channel, Float32, RobotSpec
from td3_robot.util import extras
from td3_robot.util.text import exception_line
from td3_robot_sims.backends import results
from td3_robot_sims.backends.base import Environment

_DEFAULT_PERIOD = 1 / 50  # s, for tasks that do not declare a rate
_SUPPORTED = "supported: vectors (a Box) of floats; the limits of actions must be finite"
SCORE_LIMIT = 10.0
"""Largest absolute score of a discrete action. This limit hardly restricts a policy.

With logits of 10 and -10, one action is e^20 times more probable than the other.
"""


class GymnasiumEnvironment(Environment):
    """A Gymnasium task with continuous actions and its registered time limit.

    At each reset, the task gets this environment's random generator as ``np_random``. If the task also draws from
    another random generator, :meth:`restore_state` cannot repeat the episode, and raises BundleError.

    The attribute ``robot_spec`` of Gymnasium's environment may hold the specification of a robot, as a
    :class:`RobotSpec` or as the map that :meth:`RobotSpec.describe` returns. The task then has this specification, and
    its policies fit a driver with the same specification. Sizes and limits must equal those of the spaces.

    Args:
        kind: name of the backend. Without a ``robot_spec``, the robot's name begins with this name.
        name: ``ID`` or ``MODULE:ID``.

    Raises:
        ConfigError: the module cannot be imported, the task does not exist or cannot be made, a package is missing,
            the spaces are not supported, or ``robot_spec`` does not fit them.
    """

    def __init__(self, kind: str, name: str, seed: int | None, randomization: RandomizationConfig | None) -> None:
        task = f"{kind}:{name}"
        module, _, identity = name.rpartition(":")
        env = _make(task, module, identity)
        try:
            actions = self._action_channels(task, env)
            observations = _channels(task, "observation", getattr(env, "observation_space", None))
            # The robot's name omits the module, so that a policy fits even if another module registers the task.
            spec = _own_spec(task, env, RobotSpec(f"{kind}:{identity}", observations, actions, _period(env)))
        except ConfigError:
            env.close()
            raise
        limit = env.spec.max_episode_steps if env.spec else None
        super().__init__(spec, limit or 0, seed, randomization)
        # Remove the TimeLimit wrapper, because the base class already applies the time limit.
        self._env = env.env if isinstance(env, TimeLimit) else env

    def _action_channels(self, task: str, env: gymnasium.Env[Any, Any]) -> tuple[Channel, ...]:
        return _channels(task, "action", getattr(env, "action_space", None))

    def _command(self, action: Float32) -> Any:
        """Return the action for the task as a copy, because the task may write into it."""
        return action.copy()

    def _reset(self) -> Float32:
        self._env.unwrapped.np_random = self.random
        result = self._env.reset()
        given: Float32 = results.fields(self.task_name, "reset", result, ("observation", "info"))[0]
        return given  # the base class converts it

    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        result = self._env.step(self._command(action))
        observation, reward, terminated, truncated, info = results.fields(
            self.task_name, "step", result, (*results.STEP, "info")
        )
        self._terms = results.reward_terms(self.task_name, info)
        return observation, reward, terminated, truncated  # the base class converts them

    def render(self, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        """Return the task's own picture, scaled by repeating or omitting pixels."""
        try:
            rendered: Any = self._env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"task {self.task_name!r} cannot be drawn: {_one_line(error)}") from None
        except NotImplementedError:
            rendered = None
        if rendered is None:
            text = f"task {self.task_name!r} cannot be drawn: its environment has no pictures"
            if "rgb_array" in self._env.metadata.get("render_modes", ()):
                raise ConfigError(f"{text}; its render() returned None in the mode 'rgb_array'")
            raise ConfigError(f"{text}; its metadata['render_modes'] must contain 'rgb_array'")
        picture = np.asarray(rendered, np.uint8)
        rows = np.arange(height) * picture.shape[0] // height
        columns = np.arange(width) * picture.shape[1] // width
        scaled: NDArray[np.uint8] = picture[rows][:, columns, :3]
        return scaled

    def close(self) -> None:
        super().close()
        self._env.close()


class DiscreteEnvironment(GymnasiumEnvironment):
    """A Gymnasium task with ``Discrete`` actions.

    Its action is float32[A]: one score within ±10 for each discrete action, for example the logits of a categorical
    policy. The task executes the action with the highest score. If several actions have this score, it executes
    the first of them.
    """

    def _action_channels(self, task: str, env: gymnasium.Env[Any, Any]) -> tuple[Channel, ...]:
        space = getattr(env, "action_space", None)
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"task {task!r} has actions {space}; the backend 'discrete' supports only Discrete actions"
            )
        self._first = int(space.start)
        return tuple(
            Channel(f"score_{i}", "1", -SCORE_LIMIT, SCORE_LIMIT, f"score of action {self._first + i}")
            for i in range(int(space.n))
        )

    def _command(self, action: Float32) -> int:
        return self._first + int(np.argmax(action))


def _make(task: str, module: str, identity: str) -> gymnasium.Env[Any, Any]:
    """Make Gymnasium's environment, with pictures if the task supports them."""
    if module and (problem := extras.import_user_module(module)):
        raise ConfigError(f"task {task!r}: module {module!r} cannot be imported: {problem}")
    try:
        with warnings.catch_warnings():
            # Box2D's generated code warns at import, and crashes if warnings are errors.
            warnings.filterwarnings("ignore", "builtin type (Swig|swig)", DeprecationWarning)
            env = gymnasium.make(identity, disable_env_checker=True)
            if "rgb_array" in env.metadata.get("render_modes", ()):
                env.close()
                env = gymnasium.make(identity, render_mode="rgb_array", disable_env_checker=True)
            return env
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"task {task!r} needs a package that is not installed: {_one_line(error)}") from None
    except (gymnasium.error.UnregisteredEnv, ModuleNotFoundError) as error:
        raise ConfigError(f"task {task!r} does not exist: {_one_line(error)}") from None
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(f"task {task!r} cannot be made: {_one_line(error)}") from None
    except USER_CODE as error:  # the user's code may raise anything
        raise ConfigError(f"task {task!r} cannot be made: {exception_line(error)}") from None


def _channels(task: str, kind: str, space: spaces.Space[Any] | None) -> tuple[Channel, ...]:
    if isinstance(space, spaces.Box) and len(space.shape) > 1 and space.dtype == np.uint8:
        raise ConfigError(f"task {task!r} has images as {kind}s; {_SUPPORTED}")
    if isinstance(space, spaces.Box) and len(space.shape) != 1:
        raise ConfigError(f"task {task!r} has {kind}s of shape {space.shape}; the shape must have one dimension")
    if not (isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)):
        raise ConfigError(f"task {task!r} has {space} as {kind}s; {_SUPPORTED}")
    low, high = space.low.astype(float).tolist(), space.high.astype(float).tolist()
    if kind == "action" and not all(map(math.isfinite, low + high)):
        raise ConfigError(f"task {task!r} has unbounded actions {space}; {_SUPPORTED}")
    largest = float(np.finfo(np.float32).max)
    return tuple(
        # Some tasks use the largest number for "no limit", and minus zero for zero.
        Channel(f"{kind}_{i}", "1", -math.inf if a <= -largest else a + 0.0, math.inf if b >= largest else b)
        for i, (a, b) in enumerate(zip(low, high, strict=True))
    )


def _own_spec(task: str, env: gymnasium.Env[Any, Any], spaces_spec: RobotSpec) -> RobotSpec:
    """Return the specification in the environment's attribute ``robot_spec``, or else ``spaces_spec``.

    Raises:
        ConfigError: ``robot_spec`` is not a specification, or its sizes or limits differ from those of the spaces.
    """
    given = getattr(env.unwrapped, "robot_spec", None)
    if given is None:
        return spaces_spec
    if isinstance(given, Mapping):
        given = RobotSpec.from_description(given)
    if not isinstance(given, RobotSpec):
        raise ConfigError(f"task {task!r}: robot_spec is {type(given).__name__}; it must be a RobotSpec or a map")
    for kind in ("observations", "actions"):
        channels, limits = getattr(given, kind), getattr(spaces_spec, kind)
        if len(channels) != len(limits):
            raise ConfigError(
                f"task {task!r}: robot_spec has {len(channels)} {kind}; the task's space has {len(limits)} numbers"
            )
        for channel, limit in zip(channels, limits, strict=True):
            if (np.float32(channel.low), np.float32(channel.high)) != (np.float32(limit.low), np.float32(limit.high)):
                raise ConfigError(
                    f"task {task!r}: robot_spec gives {channel.name!r} the limits {channel.low:g} and "
                    f"{channel.high:g}; the task's space gives {limit.low:g} and {limit.high:g}"
                )
    return given


def _period(env: gymnasium.Env[Any, Any]) -> float:
    """Return the duration of a step (s): the task's ``dt``, or else 1 / ``render_fps``, or else 1/50."""
    dt = getattr(env.unwrapped, "dt", None)
    if isinstance(dt, float) and math.isfinite(dt) and dt > 0:
        return dt
    rate = env.metadata.get("render_fps")
    return 1 / float(rate) if rate else _DEFAULT_PERIOD


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
