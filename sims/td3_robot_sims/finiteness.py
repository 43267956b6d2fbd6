"""Errors and warnings about observations and rewards that are not finite."""

from __future__ import annotations

import numpy as np

from td3_robot.specs import Float32, RobotSpec


def not_finite(spec: RobotSpec, observation: Float32, reward: float = 0.0) -> str:
    """Name the first value that is not finite: a channel of ``observation``, float32[O], or else the reward.

    At least one of these values must not be finite in float32.
    """
    wrong = np.flatnonzero(~np.isfinite(observation))
    if len(wrong):
        index = int(wrong[0])
        return f"observation {index} ({spec.observations[index].name!r}) is {observation[index]}"
    return f"the reward is {reward}"
