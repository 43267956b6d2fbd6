"""The table of learning algorithms. Reading it imports no torch."""

from __future__ import annotations

from typing import Any

from td3_robot.registry import Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "td3": "td3_robot.learner.algorithms.td3:TD3",
        "ddpg": "td3_robot.learner.algorithms.ddpg:DDPG",
    },
    "td3_robot.algorithms",
)
"""Name, as in ``learner.algorithm``, to a subclass of :class:`td3_robot.learner.algorithms.base.Algorithm`."""

IMPLIED: dict[str, dict[str, Any]] = {
    "ddpg": {"twin_critics": False, "target_noise": 0.0, "policy_delay": 1},
}
"""The values of other ``learner`` keys that an algorithm implies: their defaults, and the only ones allowed with it.

They stand here because the configuration is checked where torch may be missing. An algorithm of an installed package
checks its options in :meth:`Algorithm.build` and raises ConfigError.
"""
