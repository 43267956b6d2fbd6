"""The walking robots as ``gymnasium.Env``, for other tools: ``gymnasium.make("td3_robot/Walker2D-v0")``.

Importing this module registers the robots. To import it and make a robot in one call, use
``gymnasium.make("td3_robot_sims.gymnasium_env:td3_robot/Walker2D-v0")``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from td3_robot.config import loading as configuration
from td3_robot.specs import Float32
from td3_robot_sims.backends.bullet.locomotion import Locomotion
from td3_robot_sims.backends.bullet.robots import CONTROL_PERIOD, MODELS, TIME_LIMIT, specification

NAMESPACE = "td3_robot"


class RobotEnv(gymnasium.Env[Float32, Float32]):
    """A walking robot, see :class:`~td3_robot_sims.backends.bullet.locomotion.Locomotion`.

    The ``info`` of ``step`` holds the reward terms. The ``info`` of ``reset`` holds the values that randomization drew.

    Args:
        task: the name of a robot in ``MODELS``.
        render_mode: None, ``rgb_array`` (pictures without a window) or ``human`` (PyBullet's window, in real time).
        width, height: size of a picture, in pixels.
        randomization: keys and values of the ``randomization:`` section of a configuration.

    Raises:
        ConfigError: ``randomization`` has an unknown key, or a value that is not allowed.
        ValueError: ``render_mode`` is not None, ``rgb_array`` or ``human``.
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 60}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        task: str,
        render_mode: str | None = None,
        width: int = 640,
        height: int = 480,
        randomization: Mapping[str, Any] | None = None,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode is {render_mode!r}; it can be None, 'human' or 'rgb_array'")
        self.render_mode = render_mode
        self._model = MODELS[task]
        content = {"task": task, "randomization": dict(randomization or {})}
        self._randomization = configuration.parse(content, source=f"{NAMESPACE}/{task}").randomization
        self._size = width, height
        self._robot: Locomotion | None = None
        self._next_frame = 0.0
        spec = specification(self._model)
        low, high = np.array([(channel.low, channel.high) for channel in spec.observations], np.float32).T
        self.observation_space = spaces.Box(low, high, dtype=np.float32)
        self.action_space = spaces.Box(spec.action_low, spec.action_high, dtype=np.float32)

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[Float32, dict[str, float]]:
        """Start an episode. This also works after :meth:`close`. ``options`` has no effect."""
        super().reset(seed=seed)
        if self._robot is None:
            # Without a seed, draw a seed from this object's random stream. close() does not restart this stream.
            start = None if seed is not None else int(self.np_random.integers(2**32))
            show = self.render_mode == "human"
            self._robot = Locomotion(self._model, start, show, self._randomization)
        observation = self._robot.reset(seed)
        if self.render_mode == "human":
            self._robot.follow()
        self._next_frame = time.monotonic()
        return observation, dict(self._robot.world)

    def step(self, action: Float32) -> tuple[Float32, float, bool, bool, dict[str, float]]:
        if self._robot is None:
            raise RuntimeError(f"{self._model.name}: call reset() first")
        outcome = self._robot.step(action)
        if self.render_mode == "human":
            self._robot.follow()
            self._wait_for_real_time()
        return *outcome, self._robot.reward_terms()

    def _wait_for_real_time(self) -> None:
        now = time.monotonic()
        self._next_frame = max(self._next_frame + CONTROL_PERIOD, now - CONTROL_PERIOD)
        if self._next_frame > now:
            time.sleep(self._next_frame - now)

    def render(self) -> NDArray[np.uint8] | None:
        """Return a picture, uint8[height, width, 3], in mode ``rgb_array``; None in other modes."""
        if self.render_mode != "rgb_array":
            return None
        if self._robot is None:
            raise RuntimeError(f"{self._model.name}: call reset() before render()")
        return self._robot.render(*self._size)

    def close(self) -> None:
        if self._robot is not None:
            self._robot.close()
            self._robot = None


for name in MODELS:
    gymnasium.register(
        f"{NAMESPACE}/{name}-v0",
        entry_point="td3_robot_sims.gymnasium_env:RobotEnv",
        kwargs={"task": name},
        max_episode_steps=TIME_LIMIT,
    )
