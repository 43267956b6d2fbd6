"""Functions that make randomized robots, and environments with scripted episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Outcome

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.specs import Float32, RobotSpec


class Scripted:
    """An environment that follows a script.

    For each episode, the script sets the length, and whether the episode ends as terminated or truncated. The
    observation is (episode, step, action[0]).
    """

    concurrent = False
    task_name = "toy:Scripted"

    def __init__(self, spec: RobotSpec, script: list[tuple[int, bool, bool]]) -> None:
        self.spec = spec
        self.script = script
        self.episode = -1
        self.count = 0
        self.world: dict[str, float] = {}

    def reset(self, seed: int | None = None) -> Float32:
        del seed
        self.episode, self.count = self.episode + 1, 0
        return np.array([self.episode, 0, 0], np.float32)

    def step(self, action: Float32) -> Outcome:
        self.count += 1
        length, terminated, truncated = self.script[self.episode % len(self.script)]
        over = self.count == length
        observation = np.array([self.episode, self.count, action[0]], np.float32)
        return Outcome(observation, float(self.count), over and terminated, over and truncated)

    def close(self) -> None: ...


def randomization(**content: Any) -> RandomizationConfig:
    """Return the configuration section ``randomization`` with these keys."""
    return msgspec.convert(content, RandomizationConfig)


def make(task: str, seed: int = 1, **content: Any) -> Any:
    """Make an environment with the randomization ``content``."""
    return tasks.make(task, seed, randomization(**content))


@pytest.fixture
def scripted(spec: RobotSpec) -> Callable[..., Any]:
    """Makes scripted environments of the toy robot from lists of (length, terminated, truncated)."""
    return lambda script: Scripted(spec, script)
