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
"""Name, as in ``learner.algorithm``, to a subclass of :class:`td3_robot.learner.algorithms.base.Algorithm`."""

IMPLIED: dict[str, dict[str, Any]] = {
    "ddpg": {"twin_critics": False, "target_noise": 0.0, "policy_delay": 1},
    "a2c": {"learning_starts": 0},
}
"""The values of other ``learner`` keys that an algorithm implies: their defaults, and the only ones allowed with it.

They stand here because the configuration is checked where torch may be missing. An algorithm of an installed package
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
"""The ``learner`` keys that mean nothing to an algorithm, and so must have their defaults."""

ON_POLICY = ("a2c",)
"""The algorithms above that consume rollouts: they need no replay buffer, and no exploration noise is configured."""

TASKS = {"a2c": "discrete:"}
"""What the names of an algorithm's tasks begin with, if it cannot learn all tasks."""
