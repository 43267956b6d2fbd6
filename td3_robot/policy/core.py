"""The policy server without I/O: Steps and Weights in, Actions out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from td3_robot.arrays import finite
from td3_robot.bundle import Bundle, sha256
from td3_robot.errors import BundleError
from td3_robot.messages import Action, Bye, NoiseKind, Step, Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.noise import Noise
from td3_robot.specs import Float32, RobotSpec
from td3_robot.transport.session import Input, Output, Peer

log = logging.getLogger(__name__)

_KEPT = 4  # versions: in lock-step a source may still need the one before while another already needs the next

_KINDS = {"none": NoiseKind.NONE, "gaussian": NoiseKind.GAUSSIAN, "uniform": NoiseKind.UNIFORM}


@dataclass(frozen=True, eq=False)
class Policy:
    """Weights ready to act: swapped as a whole, between two actions."""

    version: int
    bundle: Bundle
    actor: Actor
    noise_kind: NoiseKind
    noise_scale: Float32  # [1, A]: standard deviation of Gaussian noise


class PolicyCore:
    """Answers every Step with the newest policy, or in lock-step with exactly the version the Step names.

    Args:
        seed: of the exploration noise.
        exploring: False serves the bare actor, whatever the weights ask for.
    """

    def __init__(self, seed: int, *, exploring: bool = True) -> None:
        self.seed = seed
        self.exploring = exploring
        self.policies: dict[int, Policy] = {}
        self.counters: Counter[str] = Counter()
        self._parked: dict[Peer, Step] = {}
        self._noise: dict[Peer, Noise] = {}

    @property
    def version(self) -> int:
        """Newest weights held; 0 for none."""
        return max(self.policies, default=0)

    @property
    def spec(self) -> RobotSpec | None:
        return self.policies[self.version].bundle.spec if self.policies else None

    def load(self, version: int, bundle: Bundle) -> None:
        """Serve this policy from the next action on.

        Raises:
            BundleError: it is not newer than the one served, or for another robot.
        """
        if version <= self.version:
            raise BundleError(f"weights version {version} is not newer than {self.version}, which is served")
        if self.spec and (difference := self.spec.difference(bundle.spec)):
            raise BundleError(f"weights version {version} are for another robot: {difference}")
        actor = Actor(bundle)
        scale = np.float32(bundle.exploration.scale) * actor.half
        self.policies[version] = Policy(version, bundle, actor, _KINDS[bundle.exploration.kind], scale)
        for old in sorted(self.policies)[:-_KEPT]:
            del self.policies[old]

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived and answer what can be answered; ``now`` is in seconds and only passed through."""
        del now  # watchdogs will want it
        fresh: dict[Peer, Step] = {}
        for origin, message in inputs:
            if isinstance(message, Weights):
                self._receive(message)
            elif isinstance(origin, Peer) and isinstance(message, Step):
                self.counters["steps"] += 1
                if origin in fresh or origin in self._parked:
                    self.counters["skipped"] += 1
                    self._parked.pop(origin, None)
                fresh[origin] = message
            elif isinstance(origin, Peer) and isinstance(message, Bye):
                for known in (fresh, self._parked, self._noise):
                    known.pop(origin, None)
        outputs: list[Output] = []
        for peer, step in {**self._parked, **fresh}.items():
            action = self._answer(peer, step)
            if action is None:
                self._parked[peer] = step
            else:
                self._parked.pop(peer, None)
                outputs.append((peer, action))
        self.counters["actions"] += len(outputs)
        return outputs

    def _receive(self, weights: Weights) -> None:
        try:
            if sha256(weights.payload) != weights.sha256:
                raise BundleError(f"weights version {weights.version}: the hash does not fit the payload")
            self.load(weights.version, Bundle.decode(weights.payload, f"weights version {weights.version}"))
        except BundleError as error:
            self.counters["weights_refused"] += 1
            log.warning("refused: %s", error)

    def _answer(self, peer: Peer, step: Step) -> Action | None:
        policy = self.policies.get(step.needs_version or self.version)
        if policy is None:
            return None
        spec = policy.bundle.spec
        if (step.observation.shape[1], step.action.shape[1]) != (spec.observation_size, spec.action_size):
            self.counters["other_robot"] += 1  # it joined before any weights said which robot this is; it is leaving
            return None
        kind = policy.noise_kind if self.exploring else NoiseKind.NONE
        action = self._act(peer, step, policy, kind)
        if not finite(action):  # finite weights can still overflow
            self.counters["not_finite"] += 1
            return None
        return Action(
            source=step.source,
            incarnation=step.incarnation,
            answers=step.sequence,
            stamp=step.stamp,
            action=action,
            weights_version=policy.version,
            noise_kind=int(kind),
            noise_seed=self.seed if kind else 0,
        )

    def _act(self, peer: Peer, step: Step, policy: Policy, kind: NoiseKind) -> Float32:
        actor = policy.actor
        if kind is NoiseKind.NONE:
            return actor(step.observation)
        noise = self._noise.get(peer)
        if noise is None:
            robots, actions = step.action.shape
            noise = self._noise[peer] = Noise(self.seed, step.source, step.incarnation, robots, actions)
        drawn = noise(kind, step.episode, step.episode_step)
        if kind is NoiseKind.UNIFORM:
            action = actor.low + drawn * (actor.high - actor.low)
        else:
            action = actor.unclipped(step.observation)
            drawn *= policy.noise_scale
            action += drawn
        return actor.clip(action)
