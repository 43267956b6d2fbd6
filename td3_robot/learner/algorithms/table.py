"""The table of learning algorithms. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from td3_robot.errors import ConfigError
from td3_robot.registry import Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "td3": "td3_robot.learner.algorithms.td3:TD3",
        "ddpg": "td3_robot.learner.algorithms.ddpg:DDPG",
        "a2c": "td3_robot.learner.algorithms.a2c:A2C",
    },
    "td3_robot.algorithms",
)
"""Maps a name in ``learner.algorithm`` to a subclass of :class:`td3_robot.learner.algorithms.base.Algorithm`."""

IMPLIED: dict[str, dict[str, Any]] = {
    "ddpg": {"twin_critics": False, "target_noise": 0.0, "policy_delay": 1},
    "a2c": {"learning_starts": 0},
}
"""Maps an algorithm to the ``learner`` keys that it fixes, and to their values.

For this algorithm, these values are the defaults, and all other values of these keys are errors. The values are in
this file because the configuration is also checked without torch. An algorithm of an installed package checks its
options in :meth:`Algorithm.build` and raises ConfigError.
"""

_PACE = ("learning_rate", "learning_rate_end", "learning_rate_falls_from", "learning_starts")
USES: dict[str, Collection[str]] = {"a2c": ("algorithm", "discount", *_PACE, "device", "precision", "threads")}
"""The only ``learner`` keys that an algorithm uses. All other ``learner`` keys must have their default values.

An algorithm that is not in this table uses all keys.
"""

CONSUMES = {"td3": "transitions", "ddpg": "transitions", "a2c": "rollouts"}
"""The attribute ``consumes`` of this package's algorithms, see :class:`td3_robot.learner.algorithms.base.Algorithm`.

The attribute is repeated here because importing the class of an algorithm loads torch.
"""

TASKS = {"a2c": "discrete:"}
"""Maps an algorithm to a prefix. The algorithm can learn only tasks whose names begin with this prefix.

Other algorithms can learn every task.
"""


def broken_rule(name: str, problem: str) -> ConfigError:
    """The error about an algorithm that breaks a rule of :class:`td3_robot.learner.algorithms.base.Algorithm`."""
    return ConfigError(f"learner.algorithm is {name!r}: {problem}")
