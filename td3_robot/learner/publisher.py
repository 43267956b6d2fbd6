"""Publishes weights: to policy servers, and to the evaluator when an evaluation is due."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from td3_robot import noises
from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.config.schema import Config
from td3_robot.core_types import Output, Peer
from td3_robot.errors import BundleError
from td3_robot.learner.evaluations import Evaluations
from td3_robot.learner.gauges import Gauges
from td3_robot.learner.learning import Learning
from td3_robot.messages import MAX_PAYLOAD, Weights

_RESENT = 2  # in lock-step, a restarted policy server may need the two newest versions


class Publisher:
    """Gives each published policy a version number, and sends the policy.

    Attributes:
        version: the newest version number; 0 before the first Weights.
        published_at: number of updates in the newest Weights for the policy servers.
        explores: whether learning has started. Then the policy servers use the configured exploration noise.
        sent: the last two Weights for the policy servers, the older one first.
    """

    def __init__(self, config: Config, learning: Learning, gauges: Gauges, provenance: Mapping[str, Any]) -> None:
        self.version = self.published_at = 0
        self.explores = config.learner.learning_starts == 0
        self.sent: deque[Weights] = deque(maxlen=_RESENT)
        self.evaluations = Evaluations(config.evaluation)
        self.policies: set[Peer] = set()
        self.evaluators: set[Peer] = set()
        self._config, self._learning, self._gauges, self._provenance = config, learning, gauges, provenance

    def leave(self, peer: Peer) -> None:
        self.policies.discard(peer)
        self.evaluators.discard(peer)

    def bundle(self, *, averaged: bool = False) -> Bundle:
        """The policy that chooses the robots' actions. With ``averaged``: the policy for evaluations and files."""
        if self._learning.spec is None:
            raise BundleError("the learner has no policy yet: no simulator or driver has joined")
        training, learner = self._learning.training, self._config.learner
        tensors = training.policy_tensors(averaged=averaged)
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            raise self._learning.diverged("the policy's weights are no longer finite")
        return Bundle(
            self._learning.spec,
            self._config.network.hidden,
            tensors,
            self._exploration(),
            {
                **self._provenance,
                "precision": learner.precision,
                **({"compiled": training.algorithm.compiled} if learner.compiles else {}),
                "version": self.version,
                "updates": self._learning.updates,
                "env_steps": self._learning.env_steps,
            },
            self._config.safety,
        )

    def _exploration(self) -> Exploration:
        """The exploration of the policy servers, from the algorithm or from the configuration."""
        learner, asked = self._config.learner, self._config.exploration
        if prescribed := self._learning.training.algorithm.exploration:
            kind, scale = prescribed
            return Exploration(noises.like(kind, asked.kind), scale)
        if self.explores or learner.start_from is not None or learner.offline_updates > 0:
            return Exploration(asked.kind, asked.noise, asked.noise_parameters())
        return Exploration(noises.like("uniform", asked.kind))

    def final_bundle(self) -> Bundle:
        """The policy to keep at the end. It gets a new version if it may differ from the last published policy."""
        if self._learning.updates > self.published_at or self._config.learner.policy_average:
            self.version += 1
        return self.bundle(averaged=True)

    def publish(self) -> list[Output]:
        """Send a new version of the weights to every policy server."""
        weights = self._weights(averaged=False)
        self.published_at = self._learning.updates
        self._gauges.published(weights.version, self.published_at)
        self.sent.append(weights)
        return [(peer, weights) for peer in self.policies]

    def publish_if_due(self) -> list[Output]:
        """Publish if enough updates followed the last publication, if learning starts, or if an evaluation is due."""
        learning = self._learning
        if learning.spec is None:
            return []
        every = 1 if learning.training.on_policy else self._config.learner.publish_every
        evaluate = self.evaluations.due(learning.env_steps)
        starts = not self.explores and learning.env_steps >= learning.limiter.start
        self.explores = self.explores or starts
        outputs = self._evaluate() if evaluate else []
        if starts or evaluate or learning.updates - self.published_at >= every:
            outputs += self.publish()
        return outputs

    def pending(self) -> list[Weights]:
        """The Weights that wait for the evaluator."""
        return list(self.evaluations.pending.values())

    def resend(self) -> list[Output]:
        """Resend the Weights that policy servers and evaluators may lack."""
        outputs: list[Output] = [(peer, weights) for peer in self.policies for weights in self.sent]
        return outputs + [(peer, weights) for weights in self.pending() for peer in self.evaluators]

    def _evaluate(self) -> list[Output]:
        """Send the policy to the evaluator, unless too many policies wait for an evaluation."""
        if not self.evaluations.plan(self._learning.env_steps):
            self.version += 1  # as if the policy were sent: versions must not depend on the speed of the evaluator
            return []
        weights = self._weights(averaged=True)
        self.evaluations.pending[weights.version] = weights
        return [(peer, weights) for peer in self.evaluators]

    def _weights(self, *, averaged: bool) -> Weights:
        self.version += 1
        payload = self.bundle(averaged=averaged).encode()
        if len(payload) > MAX_PAYLOAD:
            raise BundleError(
                f"the policy takes {len(payload):,} bytes, above the limit of {MAX_PAYLOAD:,} for Weights; "
                "use a smaller network.hidden"
            )
        return Weights(self.version, self._learning.updates, self._learning.env_steps, sha256(payload), payload)
