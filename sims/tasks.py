"""The tasks there are, by name."""

from __future__ import annotations

import difflib

from sims.locomotion import Locomotion, specification
from sims.robots import MODELS
from td3_robot.errors import ConfigError
from td3_robot.specs import RobotSpec


def names() -> tuple[str, ...]:
    return tuple(MODELS)


def spec(task: str) -> RobotSpec:
    return specification(MODELS[task])


def make(task: str, seed: int | None = None) -> Locomotion:
    if task not in MODELS:
        near = difflib.get_close_matches(task, MODELS, 3, 0.4) or list(MODELS)
        raise ConfigError(f"task {task!r} does not exist; near ones: {', '.join(near)}")
    return Locomotion(MODELS[task], seed)
