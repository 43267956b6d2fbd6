"""Tries a policy before it moves a robot."""

from __future__ import annotations

import numpy as np

from td3_robot.bundle import OBSERVATION_CLIP, OBSERVATION_MEAN, OBSERVATION_STD, Bundle
from td3_robot.errors import BundleError
from td3_robot.specs import FLOAT32_MAX, Float32, Float64, RobotSpec

TRIALS = 64
"""Number of random observations that a trial uses."""


def observations(spec: RobotSpec) -> Float32:
    """Return random observations, float32[TRIALS, O], within their ranges or, of wide ranges, near 0.

    They are the same in each call.
    """
    low, high = _ranges(spec)
    return np.random.default_rng(0).uniform(low, high, (TRIALS, len(low))).astype(np.float32)


def check_finite(bundle: Bundle, source: str) -> None:
    """Check that the network computes finite numbers for observations within their ranges, see :func:`observations`.

    Finite weights are not enough: a sum of large products overflows to infinity, and the difference of two such sums is
    not a number. The order in which a processor adds the products decides which of the two happens. So this check
    refuses a network if the sum of the products' magnitudes overflows: then the order does not matter.

    Args:
        bundle: the policy.
        source: names the policy in the error.

    Raises:
        BundleError: a sum overflows.
    """
    if _is_small(bundle):
        return
    x = _normalised(bundle, observations(bundle.spec))
    with np.errstate(all="ignore"):
        for weight, bias in _layers(bundle):
            if not np.isfinite(np.abs(x).dot(np.abs(weight).T) + np.abs(bias)).all():
                raise BundleError(
                    f"{source} gives actions that are not finite, although each observation is in its range: "
                    "a sum in its network overflows"
                )
            x = np.maximum(x.dot(weight.T) + bias, np.float32(0))


def _is_small(bundle: Bundle) -> bool:
    """Whether no sum can overflow, because the largest weight of each layer is small enough.

    This holds for each usual policy. It takes much less time than a trial, and a learner sends weights often.
    """
    low, high = _ranges(bundle.spec)
    largest = OBSERVATION_CLIP if OBSERVATION_MEAN in bundle.tensors else float(max(abs(low).max(), abs(high).max()))
    for weight, bias in _layers(bundle):
        largest = largest * weight.shape[1] * _magnitude(weight) + _magnitude(bias)
        if largest > FLOAT32_MAX / 2:  # half of it, because of rounding
            return False
    return True


def _magnitude(array: Float32) -> float:
    return max(float(array.max()), -float(array.min()))


def _layers(bundle: Bundle) -> list[tuple[Float32, Float32]]:
    """Return weight, float32[out, in], and bias, float32[out], of each layer."""
    tensors = bundle.tensors
    return [(tensors[f"actor.{i}.weight"], tensors[f"actor.{i}.bias"]) for i in range(len(bundle.hidden) + 1)]


def _normalised(bundle: Bundle, observation: Float32) -> Float32:
    if OBSERVATION_MEAN not in bundle.tensors:
        return observation
    mean, std = bundle.tensors[OBSERVATION_MEAN], bundle.tensors[OBSERVATION_STD]
    with np.errstate(all="ignore"):
        x: Float32 = np.clip((observation - mean) / std, -OBSERVATION_CLIP, OBSERVATION_CLIP)
    return x


def _ranges(spec: RobotSpec) -> tuple[Float64, Float64]:
    """Return the lower and the upper limit of each observation channel.

    A range that is wider than 2000 is cut to its part near 0, because many channels declare ranges that the robot never
    reaches. So :func:`check_finite` says nothing about larger values; the server checks each action.
    """
    low, high = (np.array([getattr(channel, side) for channel in spec.observations]) for side in ("low", "high"))
    return np.maximum(low, np.minimum(-1e3, high - 2e3)), np.minimum(high, np.maximum(1e3, low + 2e3))
