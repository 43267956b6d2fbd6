"""A2C: advantage actor-critic (Mnih et al. 2016, algorithm S3, with one worker), for discrete actions.

The policy is categorical. Each update uses the returns of one whole episode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from td3_robot.config.schema import A2CConfig
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.metrics import Metrics
from td3_robot.learner.algorithms.networks import Actor, Perceptron
from td3_robot.learner.replay_buffer.buffer import Batch

_LARGEST_LOGIT = 10.0  # logits are from -10 to 10, so one action can be e^20 times as probable as another


class A2C(Algorithm):
    """An actor with one score in [-1, 1] for each discrete action, and a critic V(s).

    The policy π draws an action from the softmax of the logits, which are ten times the scores. In an action vector,
    the largest number marks the action that π drew.

    Metrics: ``entropy`` is the entropy of π in nats. ``gradient_norm`` is the norm of the actor's gradient before
    clipping.
    """

    options: A2CConfig | None
    actor: Actor
    consumes = "rollouts"
    exploration = "categorical", 1 / _LARGEST_LOGIT
    part = "a2c"
    means = ("actor_loss", "critic_loss", "entropy", "gradient_norm")

    def build(self) -> None:
        self.section = self.options or A2CConfig()
        self.actor = self.network(Actor([self.observation_size, *self.hidden, self.action_size]))
        self.critic = self.network(Perceptron([self.observation_size, *self.hidden, 1]))
        self.actor_optimiser, self.critic_optimiser = self.adam(self.actor), self.adam(self.critic)

    def update(self, batch: Batch) -> Metrics:
        """Update both networks once with the transitions of one episode."""
        s, a, r, s2, discount = batch
        with torch.no_grad():
            goal = returns(r, discount, self.critic(s2[-1:]))

        # Actor: raise the probability of actions with a positive advantage, and add an entropy bonus
        log_pi = torch.log_softmax(_LARGEST_LOGIT * self.actor(s), 1)
        v = self.critic(s)
        advantage = goal - v.detach()
        if len(advantage) > 1:  # normalise, so that the scale of the rewards does not change the actor's loss
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        actor_loss = -(log_pi.gather(1, a.argmax(1, keepdim=True)) * advantage).mean()
        entropy = -(log_pi.exp() * log_pi).sum(1).mean()
        gradient_norm = self.minimise(
            actor_loss - self.section.entropy * entropy, self.actor_optimiser, self.section.gradient_norm
        )

        # Critic: the mean squared error of V
        critic_loss = (goal - v).square().mean()
        self.minimise(critic_loss, self.critic_optimiser, self.section.gradient_norm)
        return {
            "actor_loss": actor_loss,
            "critic_loss": critic_loss,
            "entropy": entropy,
            "gradient_norm": gradient_norm,
        }

    @property
    def progress(self) -> float:
        """Updates made, as a fraction of ``a2c.episodes``; each update uses one episode."""
        return min(1.0, self.updates / self.section.episodes)

    @torch.no_grad()
    def values(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        """V(s) of B observations, float32[B, 1] on the device. ``action`` has no effect."""
        del action
        value: Tensor = self.critic(observation.to(self.device))
        return value


def returns(reward: Tensor, discount: Tensor, beyond: Tensor) -> Tensor:
    """The discounted return from each step to the end of an episode, R(t) = r(t) + discount(t) · R(t + 1).

    Args:
        reward, discount: float32[T, 1], for the T steps of the episode.
        beyond: float32[1, 1], R(T): the value of the last observation.

    Returns:
        float32[T, 1] on the device of ``reward``.
    """
    following, found = float(beyond), []
    for r, factor in zip(reversed(reward[:, 0].tolist()), reversed(discount[:, 0].tolist()), strict=True):
        following = r + factor * following
        found.append(following)
    return torch.tensor(found[::-1], dtype=torch.float32)[:, None].to(reward.device)
