"""What the on-policy baseline makes of a configuration: some of its keys, and the others must not be set."""

from __future__ import annotations

from td3_robot.config import resume as changes
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError

_DISCRETE = "discrete:"  # begins the names of tasks with discrete actions
_USED = {
    "task",
    "launch",
    "seed",
    "total_steps",
    "network.hidden",
    "learner.discount",
    "learner.learning_rate",
    "learner.learning_rate_end",
    "learner.learning_starts",
    "learner.precision",
    "learner.device",
    "learner.threads",
    "evaluation.every",
    "evaluation.episodes",
    "evaluation.max_steps",
    "checkpoint",
    "endpoints",
    "a2c",
}
"""The last four of ``learner`` say nothing to A2C either: they follow from the machine, or must fit ``total_steps``."""


def check(config: Config) -> None:
    """Whether A2C does what a configuration asks for.

    Raises:
        ConfigError: the task has no discrete actions, or a key is set that says nothing to A2C.
    """
    if not config.task.startswith(_DISCRETE):
        raise ConfigError(f"task is {config.task!r}; the A2C baseline learns discrete actions: {_DISCRETE}ID")
    for key, (default, value) in changes.differences(Config(), config).items():
        if not any(key == used or key.startswith(f"{used}.") for used in _USED):
            raise ConfigError(f"{key} is {value}; it means nothing to the A2C baseline, and must be {default}")
