"""What a learner needs of a policy that it is to begin with, ``learner.start_from``; checked before torch is loaded."""

from __future__ import annotations

from td3_robot.bundle import OBSERVATION_MEAN, Bundle
from td3_robot.config.learner import LearnerConfig
from td3_robot.errors import BundleError
from td3_robot.specs import RobotSpec

_KEY = "learner.start_from"


def check(bundle: Bundle, spec: RobotSpec, hidden: tuple[int, ...], learner: LearnerConfig) -> None:
    """Whether learning can begin with this policy, for this robot and with these settings.

    Raises:
        BundleError: it cannot.
    """
    if difference := spec.difference(bundle.spec):
        raise BundleError(f"{_KEY}: that policy is for another robot: {difference}")
    if bundle.hidden != hidden:
        raise BundleError(
            f"{_KEY}: that policy has the hidden layers {list(bundle.hidden)}, network.hidden is {list(hidden)}; "
            "they must be the same"
        )
    normalised = OBSERVATION_MEAN in bundle.tensors
    if normalised != learner.normalise_observations:
        raise BundleError(
            f"{_KEY}: that policy {'normalises' if normalised else 'does not normalise'} its observations; "
            f"learner.normalise_observations must be {str(normalised).lower()}"
        )
    if normalised:
        observations(bundle)


def observations(bundle: Bundle) -> int:
    """How many observations the mean and deviation of a policy are of.

    Raises:
        BundleError: it does not say.
    """
    count = bundle.provenance.get("env_steps")
    if not isinstance(count, int) or count < 1:
        raise BundleError(
            f"{_KEY}: that policy normalises observations and does not say of how many its mean is: env_steps in its "
            f"provenance is {str(count)[:40]}; needed is 1 or more"
        )
    return count
