"""TD3: twin delayed deep deterministic policy gradient (Fujimoto, van Hoof and Meger 2018, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.learner.algorithms.base import Algorithm, polyak_update
from td3_robot.learner.algorithms.metrics import Metrics
from td3_robot.learner.algorithms.networks import Actor, Critics
from td3_robot.learner.replay_buffer.buffer import Batch

LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "huber": F.huber_loss}


class TD3(Algorithm):
    """An actor π, two critics Q1 and Q2, and a target network for each. Actions are normalised to [-1, 1].

    To try another loss, subclass this class and override :meth:`update`. The learner uses the :meth:`update` of the
    subclass. For TD3 itself, the learner uses a faster engine that makes the same update (see
    :mod:`td3_robot.learner.engine.selection`).

    Metrics: ``critic_loss`` is the sum of the critics' losses. ``q_mean`` is the mean of Q1(s, a). The critics' target
    is y: ``q_target_mean`` is the mean of y, and ``q_target_size`` is the mean of |y|. ``action_saturation`` is the
    fraction of the numbers in π(s) with an absolute value above 0.99. Gradient norms are measured before clipping.
    """

    actor: Actor
    part = "td3"
    means = ("critic_loss", "q_mean", "q_target_mean", "actor_loss")
    gauges = ("q_target_size", "action_saturation", "critic_gradient_norm", "actor_gradient_norm")

    def build(self) -> None:
        """Create the networks, target networks and optimisers; ``policy_average`` adds an average of the actor."""
        config, inputs = self.config, self.observation_size + self.action_size
        self.actor = self.network(Actor([self.observation_size, *self.hidden, self.action_size]))
        self.critics = self.network(
            Critics(1 + config.twin_critics, [inputs, *self.hidden, 1], layer_norm=config.layer_norm)
        )
        self.actor_target, self.critics_target = deepcopy(self.actor), deepcopy(self.critics)
        self.actor_average = deepcopy(self.actor) if config.policy_average else self.actor
        self.actor_optimiser, self.critics_optimiser = self.adam(self.actor), self.adam(*self.critics)

    def update(self, batch: Batch) -> Metrics:
        """Make one update of algorithm 1, from the computation of y to the update of the target networks."""
        config, clip = self.config, self.config.target_noise_clip
        s, a, r, s2, discount = batch

        # Target policy smoothing and clipped double Q-learning: y = r + γ min Q'(s', π'(s') + ε)
        with torch.no_grad():
            noise = (self.randn_like(a) * config.target_noise).clamp(-clip, clip)
            a2 = (self.actor_target(s2) + noise).clamp(-1, 1)
            y = r + discount * reduce(torch.minimum, self.critics_target(s2, a2))

        # Critics: minimise the sum of their losses
        q = self.critics(s, a)
        critic_loss = torch.stack([LOSSES[config.critic_loss](qi, y) for qi in q]).sum()
        critic_gradient_norm = self.minimise(critic_loss, self.critics_optimiser)
        self.td_errors = [qi.detach() - y for qi in q]
        metrics = {
            "critic_loss": critic_loss,
            "q_mean": q[0].mean(),
            "q_target_mean": y.mean(),
            "q_target_size": y.abs().mean(),
            "critic_gradient_norm": critic_gradient_norm,
        }

        # Delayed policy and target updates
        if self.due(config.policy_delay):
            if self.updates > config.critics_first:  # the first updates train only the critics
                pi = self.actor(s)
                actor_loss = -self.critics.first(s, pi).mean()
                metrics["actor_gradient_norm"] = self.minimise(actor_loss, self.actor_optimiser)
                metrics["actor_loss"] = actor_loss
                metrics["action_saturation"] = (pi.abs() > 0.99).float().mean()
            polyak_update(self.critics_target, self.critics, config.polyak)
            polyak_update(self.actor_target, self.actor, config.polyak)
            if config.policy_average:
                # At first, the average is a plain mean: each delayed update adds the current actor to the mean. In the
                # first critics_first updates, the current actor is still the initial actor.
                made = self.updates // config.policy_delay
                polyak_update(self.actor_average, self.actor, max(config.policy_average, 1 / made))
        return metrics

    def policy(self, *, averaged: bool) -> Actor:
        """The actor. With ``averaged``: its moving average, if there is one."""
        return self.actor_average if averaged and self.updates >= self.config.policy_delay else self.actor

    @torch.no_grad()
    def values(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        """Q1(s, a), or Q1(s, π(s)) without ``action``: float32[B, 1] on the device."""
        s = observation.to(self.device)
        return self.critics.first(s, self.actor(s) if action is None else action.to(self.device))

    def begin_with(self, actor: Mapping[str, NDArray[np.float32]]) -> None:
        """Copy the weights in ``actor`` to the actor and to its target network."""
        super().begin_with(actor)
        polyak_update(self.actor_target, self.actor, 1.0)
