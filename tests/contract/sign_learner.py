"""An example of an algorithm in an installed package: an actor that learns the sign of the mean of an observation.

The algorithm ignores rewards. It has momentum, noise and a parameter outside a module, so that its saved state contains
every kind of value.
"""

from __future__ import annotations

from typing import Any

import torch

from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.metrics import Metrics
from td3_robot.learner.algorithms.networks import Actor


class SignLearner(Algorithm):
    """π(s) approaches a learned scale times the sign of the mean over the channels of s."""

    def build(self) -> None:
        """Create the actor, the scale and their optimiser."""
        self.actor = self.network(Actor([self.observation_size, *self.hidden, self.action_size]))
        self.scale = torch.full((), 0.5, requires_grad=True, device=self.device)
        parameters = [*self.actor.parameters(), self.scale]
        self.optimiser = torch.optim.SGD(parameters, lr=self.config.learning_rate, momentum=0.9)

    def update(self, batch: Any) -> Metrics:
        """Make one regression step."""
        wanted = self.scale * batch.observation.mean(1, keepdim=True).sign()
        noise = 0.1 * self.randn_like(batch.action)
        loss = (self.actor(batch.observation) + noise - wanted).square().mean()
        return {"loss": loss, "gradient_norm": self.minimise(loss, self.optimiser)}
