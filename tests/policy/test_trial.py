"""A policy whose numbers overflow is refused. A policy that computes finite numbers is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from td3_robot.bundle import OBSERVATION_MEAN, OBSERVATION_STD, Bundle
from td3_robot.errors import BundleError
from td3_robot.policy.actor import Actor
from td3_robot.policy.trial import check_finite, observations

Make = Callable[..., Bundle]


def scaled(bundle: Bundle, scale: float) -> Bundle:
    return replace(bundle, tensors={name: tensor * np.float32(scale) for name, tensor in bundle.tensors.items()})


@pytest.mark.parametrize("scale", [1e15, 1e30])
def test_a_network_whose_sums_overflow_is_refused(make_bundle: Make, scale: float) -> None:
    """With three layers and a scale of 1e15, the sums are about 1e45. The largest float32 is about 3e38."""
    with pytest.raises(BundleError) as caught:
        check_finite(scaled(make_bundle(), scale), "weights version 3")
    assert str(caught.value) == (
        "weights version 3 gives actions that are not finite, although each observation is in its range: "
        "a sum in its network overflows"
    )


def test_the_order_of_a_sum_does_not_matter(make_bundle: Make) -> None:
    """A sum of 3e38, 3e38, -3e38 and -3e38 overflows or is 0. The order in which a processor adds them decides."""
    bundle = scaled(make_bundle(hidden=(4,)), 0.0)
    bundle.tensors["actor.0.bias"][:] = 1
    bundle.tensors["actor.1.weight"][:] = [3e38, -3e38, 3e38, -3e38]
    assert np.isfinite(Actor(bundle)(np.zeros((1, 3), np.float32))).all()
    with pytest.raises(BundleError, match="a sum in its network overflows"):
        check_finite(bundle, "policy")


def test_a_deep_network_with_finite_sums_is_accepted(make_bundle: Make) -> None:
    """Each layer copies one number. The product of the largest weights exceeds the largest float32."""
    bundle = scaled(make_bundle(hidden=(4,) * 60), 0.0)
    for layer in range(61):
        bundle.tensors[f"actor.{layer}.weight"][0, 0] = 2
        bundle.tensors[f"actor.{layer}.weight"][0, 1] = 64
    check_finite(bundle, "policy")


def test_normalised_observations_are_at_most_10(make_bundle: Make) -> None:
    """The first layer multiplies by 1e36: observations of about 1e3 would overflow."""
    bundle = make_bundle(hidden=())
    channels = tuple(replace(channel, low=-math.inf, high=math.inf) for channel in bundle.spec.observations)
    tensors = {name: np.full_like(tensor, 1e36) for name, tensor in bundle.tensors.items()}
    bundle = replace(bundle, spec=replace(bundle.spec, observations=channels), tensors=tensors)
    assert abs(observations(bundle.spec)).max() > 900
    with pytest.raises(BundleError, match="overflows"):
        check_finite(bundle, "policy")
    size = len(channels)
    statistics = {OBSERVATION_MEAN: np.zeros(size, np.float32), OBSERVATION_STD: np.full(size, 1e-30, np.float32)}
    check_finite(replace(bundle, tensors={**tensors, **statistics}), "policy")
