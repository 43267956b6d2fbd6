"""The policies of a server: the newest policies, the policies that a person loaded, and the policy that serves."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from td3_robot.bundle import Bundle, sha256
from td3_robot.errors import BundleError, ConfigError, LifecycleError
from td3_robot.messages import Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.policy.trial import check_finite
from td3_robot.safety.limits import SafetyConfig, joined

log = logging.getLogger(__name__)

_SPARE = 1 << 20  # maximum number of bytes of a policy besides its tensors
_KEPT = 4  # versions to keep: in lock-step, two sources may need different versions at the same time
_WITHDRAWN = 16  # withdrawn policies to remember


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy that is ready to act. The server swaps policies as a whole, between two actions.

    Attributes:
        floor: the safety settings of the policy that a person deployed last: this policy or an earlier one. A
            learner's weights can tighten these settings, but not drop them.
    """

    version: int
    bundle: Bundle
    actor: Actor
    safety: SafetyFilter
    floor: SafetyConfig

    @property
    def digest(self) -> str:
        return sha256(self.bundle.encode())


Examine = Callable[[int, str, bytes], Actor]
"""Checks weights. Arguments: version, SHA-256, bytes. Raises a BundleError if the weights must not serve."""


def read(version: int, digest: str, payload: bytes) -> Actor:
    """Check the hash and the bytes of a bundle, and make the actor. This takes milliseconds for a large policy."""
    return Actor(Bundle.verified(payload, digest, f"weights version {version}"))


def examine(version: int, digest: str, payload: bytes) -> Actor:
    """:func:`read` a bundle, and check that the policy gives finite actions."""
    actor = read(version, digest, payload)
    check_finite(actor.bundle, f"weights version {version}")
    return actor


class PolicyStore:
    """Policies by version, and what people decided about them.

    Args:
        safety: the robot's settings. For each policy, the store joins three settings: the robot's settings, the
            settings of this policy, and the settings of the policy that a person deployed last.
        lockstep: take every version of a learner's weights, in order. A learner that returns to a checkpoint sends an
            older version again. This version replaces all versions with the same or a higher number.
        frozen: refuse the weights of learners.

    Attributes:
        held: policies by version: at most the four newest, and the four newest that a person loaded.
        serving: the policy that answers unless a Step needs another policy; None before the first policy.
        newest: the version that was added last; 0 before the first policy. It becomes lower only in lock-step.
        loaded: at most the four newest versions that a person loaded, oldest first.
        withdrawn: SHA-256 of the policies that a rollback withdrew and that no person has chosen again; at most the
            last 16.
    """

    def __init__(
        self, safety: SafetyConfig, *, lockstep: bool, frozen: bool, examine: Examine, counters: Counter[str]
    ) -> None:
        self.held: dict[int, Policy] = {}
        self.serving: Policy | None = None
        self.newest = 0
        self.loaded: list[int] = []
        self.frozen = frozen
        self.withdrawn: tuple[str, ...] = ()
        self._safety = safety
        self._lockstep = lockstep
        self._examine = examine
        self._counters = counters

    def add(self, version: int, actor: Actor, *, loaded: bool = False) -> None:
        """Serve a policy from the next action on. ``loaded``: a person chose the policy.

        Raises:
            BundleError: the version is not above ``newest`` (lock-step allows this), the policy is for another robot,
                or its safety settings contradict the robot's settings.
        """
        bundle = actor.bundle
        if self.serving and (difference := self.serving.bundle.spec.difference(bundle.spec)):
            raise BundleError(f"weights version {version} are for another robot: {difference}")
        if version <= self.newest and not self._lockstep:
            raise BundleError(self._not_newer(version))
        floor = bundle.safety if loaded else self.serving.floor if self.serving else SafetyConfig()
        try:
            envelope = joined(self._safety, bundle.safety, bundle.spec, floor=floor)
        except ConfigError as error:
            raise BundleError(f"weights version {version}, with the safety settings of this server: {error}") from None
        policy = Policy(version, bundle, actor, SafetyFilter(envelope, bundle.spec), floor)
        if self._lockstep:
            self.held = {held: policy for held, policy in self.held.items() if held < version}
            self.loaded = [held for held in self.loaded if held < version]
        self.held[version], self.serving, self.newest = policy, policy, version
        if loaded:
            self.loaded = [*self.loaded[1 - _KEPT :], version]
        keep = {*sorted(self.held)[-_KEPT:], *self.loaded}
        self.held = {version: policy for version, policy in self.held.items() if version in keep}

    # -- weights of a learner ------------------------------------------------------------------------------------

    def wanted(self, weights: Weights) -> bool:
        """Whether the store would examine a learner's weights now."""
        return not self.frozen and self._early_refusal(weights.version, weights.payload) is None

    def receive_all(self, queued: list[Weights]) -> None:
        """Take a learner's weights, and empty the queue.

        The newest valid weights serve. In lock-step, the store examines all weights, because a Step may need them.
        Otherwise it examines older weights only if it refuses the newer ones.
        """
        while queued:
            weights = queued.pop(0 if self._lockstep else -1)
            if self.frozen:
                self._counters["weights_frozen"] += 1
                continue
            try:
                self.receive(weights.version, weights.sha256, weights.payload)
            except BundleError as error:
                log.warning("refused: %s", error)
                continue
            if not self._lockstep:
                self._counters["weights_skipped"] += len(queued)
                queued.clear()

    def receive(self, version: int, digest: str, payload: bytes, *, loaded: bool = False) -> None:
        """Check the bytes of a bundle and serve them. ``loaded``: a person chose the policy.

        Raises:
            BundleError: the hash does not match, the bytes are not a bundle, or :meth:`add` refuses the policy. The
                store also refuses a learner's bundle that is far larger than the serving policy, because its
                examination takes too long.
        """
        try:
            if not loaded and (refusal := self._early_refusal(version, payload)):
                raise BundleError(refusal)
            self.add(version, self._examine(version, digest, payload), loaded=loaded)
        except BundleError:
            self._counters["weights_refused"] += 1
            raise

    def _early_refusal(self, version: int, payload: bytes) -> str | None:
        """Why the store refuses a learner's weights before it examines them; None if it examines them."""
        if version <= self.newest and not self._lockstep:
            return self._not_newer(version)
        if self.serving is None:
            return None
        most = 2 * sum(tensor.nbytes for tensor in self.serving.bundle.tensors.values()) + _SPARE
        if len(payload) <= most:
            return None
        return (
            f"weights version {version} have {len(payload):,} bytes; allowed: at most {most:,}, which is 1 MiB plus "
            "twice the size of the serving policy"
        )

    def _not_newer(self, version: int) -> str:
        return f"weights version {version} is not newer than version {self.newest}, the newest one so far"

    # -- decisions of people -------------------------------------------------------------------------------------

    def load(self, version: int, digest: str, payload: bytes) -> None:
        """Serve a policy that a person sends. Version 0 means the newest version plus 1. See :meth:`receive`."""
        self.receive(version or self.newest + 1, digest, payload, loaded=True)
        self.choose()

    def choose(self) -> None:
        """Record that a person wants the serving policy. This ends an earlier withdrawal of the policy."""
        if self.withdrawn and self.serving:
            chosen = self.serving.digest
            self.withdrawn = tuple(digest for digest in self.withdrawn if digest != chosen)

    def roll_back(self, version: int = 0) -> Policy:
        """Serve a held policy again, withdraw the current policy, and freeze. Return the policy that serves.

        Version 0 chooses from the held versions before the current version. If a person loaded some of these versions,
        it chooses the newest version that a person loaded. Otherwise, it chooses the newest version. A version other
        than 0 may also be newer than the current version. Raises LifecycleError if the store does not hold the policy.
        """
        before = self.serving
        if before is None:
            raise LifecycleError("the server has no policy, so it cannot roll back")
        older = [held for held in self.held if held < before.version]
        chosen = version or max([held for held in older if held in self.loaded] or older, default=0)
        if chosen not in self.held:
            raise LifecycleError(
                f"version {version} is not held: {', '.join(map(str, sorted(self.held)))} are"
                if version
                else f"there is no policy before version {before.version}"
            )
        policy = self.serving = self.held[chosen]
        if before is not policy:
            self.choose()
            self.withdrawn = (*self.withdrawn[1 - _WITHDRAWN :], before.digest)
        self.frozen = True  # without the freeze, a learner's next weights would undo the rollback
        return policy

    @property
    def is_withdrawn(self) -> bool:
        """Whether a rollback withdrew the policy that serves, and no person has chosen it since."""
        return self.serving is not None and self.serving.digest in self.withdrawn
