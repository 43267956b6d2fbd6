"""The table of learning algorithms. Reading it imports no torch."""

from __future__ import annotations

from typing import Any

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
"""The values of other ``learner`` keys that an algorithm implies. With it, they are the defaults and the only allowed
values.

They are in this file because the configuration is also checked without torch. An algorithm of an installed package
checks its options in :meth:`Algorithm.build` and raises ConfigError.
"""

UNUSED: dict[str, tuple[str, ...]] = {
    "a2c": (
        "twin_critics",
        "batch_size",
        "polyak",
        "target_noise",
        "target_noise_clip",
        "policy_delay",
        "policy_average",
        "layer_norm",
        "n_step",
        "critic_loss",
        "gradient_clip",
        "replay",
        "priority_exponent",
        "normalise_observations",
        "buffer_size",
        "replay_storage",
        "replay_ratio",
        "replay_ratio_band",
        "publish_every",
        "threads_in",
        "compile",
        "recordings",
        "offline_updates",
        "start_from",
        "critics_first",
    ),
}
"""The ``learner`` keys that an algorithm does not use. They must have their default values."""

ON_POLICY = ("a2c",)
"""The algorithms above that consume rollouts. They use no replay buffer and no configured exploration noise."""

TASKS = {"a2c": "discrete:"}
"""For an algorithm that cannot learn every task: the prefix of the tasks that it can learn."""
