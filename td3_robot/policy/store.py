"""The policies a server holds: the newest ones, those that people loaded, and which of them serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from td3_robot.bundle import Bundle
from td3_robot.errors import BundleError, ConfigError, LifecycleError
from td3_robot.policy.actor import Actor
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.safety.limits import SafetyConfig, joined

_SPARE = 1 << 20  # bytes of a policy beside its tensors
_KEPT = 4  # versions: in lock-step a source may still need the one before while another already needs the next


@dataclass(frozen=True, eq=False)
class Policy:
    """Weights ready to act: swapped as a whole, between two actions.

    Attributes:
        floor: settings of the policy a person deployed last before these weights, or of these if a person deployed
            them: weights of a learner that follow can tighten them, and not drop them.
    """

    version: int
    bundle: Bundle
    actor: Actor
    safety: SafetyFilter
    floor: SafetyConfig


@dataclass(frozen=True, eq=False)
class Examined:
    """Bytes that were found to be a policy, and what takes long to make of them."""

    bundle: Bundle
    actor: Actor


Examine = Callable[[int, str, bytes], Examined]
"""Bytes that came as weights of this version, with their hash, looked at; a BundleError if they are no policy."""


def examine(version: int, digest: str, payload: bytes) -> Examined:
    """Check bytes, and make of them what acts.

    Raises:
        BundleError: the hash does not fit, or they are no bundle.
    """
    bundle = Bundle.verified(payload, digest, f"weights version {version}")
    return Examined(bundle, Actor(bundle))


class PolicyStore:
    """Policies by version.

    Args:
        safety: the robot's settings, joined with those of each policy. Those of the policy that a person deployed hold
            for the weights of learners that follow it, too.
        may_go_back: a version that is not newer replaces all that are as new or newer (lock-step, where a learner that
            goes back to a checkpoint makes the same versions again).
        examine: looks at bytes: :func:`examine`, or what remembers its results.

    Attributes:
        held: at most the four newest, and the four newest of those that a person loaded.
        serving: the one that answers where nothing else is asked for; None before the first.
        newest: the highest version there ever was; 0 for none.
        loaded: at most the four newest versions that a person chose, oldest first.
    """

    def __init__(self, safety: SafetyConfig, *, may_go_back: bool = False, examine: Examine = examine) -> None:
        self.held: dict[int, Policy] = {}
        self.serving: Policy | None = None
        self.newest = 0
        self._safety = safety
        self._may_go_back = may_go_back
        self._examine = examine
        self.loaded: list[int] = []

    def add(self, version: int, bundle: Bundle, *, loaded: bool = False, actor: Actor | None = None) -> None:
        """Serve this policy from the next action on; ``loaded`` says that a person chose it. ``actor`` is its actor, if
        there is one already.

        Raises:
            BundleError: it is not newer than any before (unless it may go back), for another robot, or its safety
                settings and the robot's leave no action.
        """
        if self._may_go_back:
            self.held = {held: policy for held, policy in self.held.items() if held < version}
            self.newest = max(self.held, default=0)
        if version <= self.newest:
            raise BundleError(self._not_newer(version))
        if self.serving and (difference := self.serving.bundle.spec.difference(bundle.spec)):
            raise BundleError(f"weights version {version} are for another robot: {difference}")
        floor = bundle.safety if loaded else self.serving.floor if self.serving else SafetyConfig()
        try:
            envelope = joined(self._safety, bundle.safety, bundle.spec, floor=floor)
        except ConfigError as error:
            raise BundleError(f"weights version {version}, with this server's own safety settings: {error}") from None
        policy = Policy(version, bundle, actor or Actor(bundle), SafetyFilter(envelope, bundle.spec), floor)
        self.held[version], self.serving, self.newest = policy, policy, version
        if loaded:
            self.loaded = [*self.loaded[1 - _KEPT :], version]
        keep = {*sorted(self.held)[-_KEPT:], *self.loaded}
        self.held = {version: policy for version, policy in self.held.items() if version in keep}

    def receive(self, version: int, digest: str, payload: bytes, *, loaded: bool = False) -> None:
        """Check bytes and serve them.

        Raises:
            BundleError: the hash does not fit, they are no bundle, or see :meth:`add`; or they are far more than those
                that serve, and no person chose them: to look at them takes time and memory.
        """
        if not loaded and (refusal := self.unseen(version, payload)):
            raise BundleError(refusal)
        examined = self._examine(version, digest, payload)
        self.add(version, examined.bundle, loaded=loaded, actor=examined.actor)

    def unseen(self, version: int, payload: bytes) -> str | None:
        """Why weights from a learner are not even looked at; None if they are."""
        if version <= self.newest and not self._may_go_back:
            return self._not_newer(version)
        if self.serving is None:
            return None
        most = 2 * sum(tensor.nbytes for tensor in self.serving.bundle.tensors.values()) + _SPARE
        if len(payload) <= most:
            return None
        return (
            f"weights version {version} take {len(payload):,} bytes; at most {most:,}, twice what serves "
            "and a megabyte, are taken from a learner"
        )

    def _not_newer(self, version: int) -> str:
        return f"weights version {version} is not newer than {self.newest}, which is served"

    def roll_back(self, version: int = 0) -> Policy:
        """Serve an older one again: that version, or the newest older one that a person loaded, or else the one before.

        Raises:
            LifecycleError: there is none like that.
        """
        if self.serving is None:
            raise LifecycleError("there is no policy to go back from")
        older = [held for held in self.held if held < self.serving.version]
        chosen = version or max([held for held in older if held in self.loaded] or older, default=0)
        if chosen not in self.held:
            raise LifecycleError(
                f"version {version} is not held: {', '.join(map(str, sorted(self.held)))} are"
                if version
                else f"there is no policy before version {self.serving.version}"
            )
        self.serving = self.held[chosen]
        return self.serving
