"""Any continuous task of Gymnasium, named ``gymnasium:ID``.

One of the user's own is ``gymnasium:MODULE:ID``: the module, which registers it, is imported first. The robot is the
same under both names.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import ConfigError
from td3_robot.specs import Channel, Float32, RobotSpec
from td3_robot.util import extras
from td3_robot_sims.backends.repeatable import Repeatable

PREFIX = "gymnasium:"
_DEFAULT_PERIOD = 1 / 50  # s, for tasks that tell no rate
_SUPPORTED = "supported are a Box of float actions with finite limits and a Box of float observations, both vectors"


class GymnasiumTask(Repeatable):
    """A Gymnasium task; see :class:`td3_robot_sims.backends.environment.Environment`.

    Its time limit is the registered one. The random stream is its own generator; a task that draws from elsewhere
    cannot be restored, which :meth:`restore_state` notices.

    Raises:
        ConfigError: no such task, or module, it lacks a package, or its spaces are not supported.
    """

    def __init__(self, task: str, seed: int | None = None, randomization: RandomizationConfig | None = None) -> None:
        env = _make(task)
        try:
            actions = self._action_channels(task, env)
            observations = _channels(task, "observation", env.observation_space)
            kind, _, name = parts(task)  # policies are for the task, whichever module registers it
            spec = RobotSpec(f"{kind}:{name}", observations, actions, _period(env))
        except ConfigError:
            env.close()
            raise
        limit = env.spec.max_episode_steps if env.spec else None
        super().__init__(spec, limit or 0, seed, randomization)
        # Without the wrapper that counts: its truncation would look like the task's own.
        self._env = env.env if isinstance(env, TimeLimit) else env
        self._terms: dict[str, float] = {}

    def _action_channels(self, task: str, env: gymnasium.Env[Any, Any]) -> tuple[Channel, ...]:
        """What the task's actions are made of."""
        return _channels(task, "action", env.action_space)

    def _command(self, action: Float32) -> Any:
        """What the task takes for an action, float32[A]; the task may write into it."""
        return action.copy()

    def _reset(self) -> Float32:
        self._env.unwrapped.np_random = self.random
        self._terms = {}
        return np.array(self._env.reset()[0], np.float32)

    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        observation, reward, terminated, truncated, info = self._env.step(self._command(action))
        terms = {key: value for key, value in info.items() if key.startswith("reward_") and np.ndim(value) == 0}
        self._terms = {key: float(value) for key, value in terms.items()} or {"reward": float(reward)}
        return np.array(observation, np.float32), float(reward), bool(terminated), bool(truncated)

    def reward_terms(self) -> dict[str, float]:
        return dict(self._terms)

    def render(self, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        """The task's own picture, scaled to the size asked for by repeating or leaving out pixels."""
        try:
            picture = np.asarray(self._env.render(), np.uint8)
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"task {self.spec.name!r} cannot be drawn: {_one_line(error)}") from None
        except NotImplementedError:
            raise ConfigError(f"task {self.spec.name!r} cannot be drawn: its environment has no pictures") from None
        rows = np.arange(height) * picture.shape[0] // height
        columns = np.arange(width) * picture.shape[1] // width
        scaled: NDArray[np.uint8] = picture[rows][:, columns, :3]
        return scaled

    def close(self) -> None:
        super().close()
        self._env.close()


def _make(task: str) -> gymnasium.Env[Any, Any]:
    """The task, ready to draw if it can."""
    _, module, name = parts(task)
    if module and (problem := extras.import_own(module)):
        raise ConfigError(f"task {task!r}: module {module!r} cannot be imported: {problem}")
    try:
        with warnings.catch_warnings():
            # Box2D's generated code warns when it is imported, and crashes where warnings are errors.
            warnings.filterwarnings("ignore", "builtin type (Swig|swig)", DeprecationWarning)
            env = gymnasium.make(name, disable_env_checker=True)
            if "rgb_array" in env.metadata.get("render_modes", ()):
                env.close()
                env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True)
            return env
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"task {task!r} needs a package that is not installed: {_one_line(error)}") from None
    except (gymnasium.error.UnregisteredEnv, ModuleNotFoundError) as error:
        raise ConfigError(f"task {task!r} does not exist: {_one_line(error)}") from None
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(f"task {task!r} cannot be made: {_one_line(error)}") from None


def parts(task: str) -> tuple[str, str, str]:
    """What a task's name consists of: kind, the module to import first (empty for none), and Gymnasium's ID."""
    kind, _, rest = task.partition(":")
    module, _, name = rest.rpartition(":")
    return kind, module, name


def _channels(task: str, kind: str, space: spaces.Space[Any]) -> tuple[Channel, ...]:
    vector = isinstance(space, spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)
    if not vector:
        found = "images" if isinstance(space, spaces.Box) and len(space.shape) > 1 else str(space)
        raise ConfigError(f"task {task!r} has {kind}s {found}; {_SUPPORTED}")
    assert isinstance(space, spaces.Box)
    low, high = space.low.astype(float).tolist(), space.high.astype(float).tolist()
    if kind == "action" and not all(map(math.isfinite, low + high)):
        raise ConfigError(f"task {task!r} has unbounded actions {space}; {_SUPPORTED}")
    largest = float(np.finfo(np.float32).max)
    return tuple(
        # Some tasks write the largest number for "no limit", and minus zero for zero.
        Channel(f"{kind}_{i}", "1", -math.inf if a <= -largest else a + 0.0, math.inf if b >= largest else b)
        for i, (a, b) in enumerate(zip(low, high, strict=True))
    )


def _period(env: gymnasium.Env[Any, Any]) -> float:
    """Seconds a step stands for: the task's own ``dt``, else one frame of its film, else 1/50 s."""
    dt = getattr(env.unwrapped, "dt", None)
    if isinstance(dt, float) and math.isfinite(dt) and dt > 0:
        return dt
    rate = env.metadata.get("render_fps")
    return 1 / float(rate) if rate else _DEFAULT_PERIOD


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
