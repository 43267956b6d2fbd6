"""Gymnasium's tasks with discrete actions, named ``discrete:ID``: for the on-policy baseline, and to evaluate it.

Everything here acts with vectors of numbers. Such a task takes one number for each of its actions, a score, and does
the one with the highest: the mean of a continuous policy or the logits of a categorical one will do as scores.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from td3_robot.errors import ConfigError
from td3_robot.specs import Channel, Float32
from td3_robot_sims.backends.gymnasium.environment import GymnasiumTask

SCORE_LIMIT = 10.0
"""Scores lie within this of zero. As logits that is no bound in practice: e^20 to one is as good as never."""


class DiscreteTask(GymnasiumTask):
    """A Gymnasium task with ``Discrete`` actions; see :class:`td3_robot_sims.backends.environment.Environment`.

    Its action is float32[A], one score within ±10 for each of the A discrete actions; of equal ones the first counts.

    Raises:
        ConfigError: no such task, it lacks a package, or its spaces are not supported.
    """

    def _action_channels(self, task: str, env: gymnasium.Env[Any, Any]) -> tuple[Channel, ...]:
        space = env.action_space
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(f"task {task!r} has actions {space}; after 'discrete:' only Discrete ones are supported")
        self._first = int(space.start)
        return tuple(
            Channel(f"score_{i}", "1", -SCORE_LIMIT, SCORE_LIMIT, f"score of action {self._first + i}")
            for i in range(int(space.n))
        )

    def _command(self, action: Float32) -> int:
        return self._first + int(np.argmax(action))
