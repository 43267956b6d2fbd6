"""A2C, the on-policy baseline, in one process, started by ``launch/a2c.yaml``.

Advantage actor-critic (Mnih et al. 2016, algorithm S3, without its parallel actors) with the discounted returns of
whole episodes and a categorical policy. It is what the off-policy methods are compared with, and shares with them what
fits: run folder, configuration, metrics, evaluation, policy bundles. Its networks are plain torch with autograd.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from td3_robot.bundle import Bundle
from td3_robot.config.schema import Config
from td3_robot.core_types import Input, Output
from td3_robot.errors import BundleError
from td3_robot.learner.checkpointing import checkpoint
from td3_robot.learner.engine import threads
from td3_robot.learner.evaluations import evaluation_record, next_multiple
from td3_robot.learner.gauges import Gauges
from td3_robot.learner.metrics_writer import MetricsWriter
from td3_robot.policy.actor import Actor
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.specs import Float32, RobotSpec
from td3_robot_sims import a2c_config, tasks
from td3_robot_sims.backends.gymnasium.environment import SCORE_LIMIT
from td3_robot_sims.rollout import SEED_OFFSET, episodes

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


def discounted(rewards: Sequence[float], discount: float, beyond: float) -> Float32:
    """Discounted returns of an episode's steps, float32[T], from its rewards and the value of what came after it."""
    returns = np.empty(len(rewards), np.float32)
    for step in range(len(rewards) - 1, -1, -1):
        returns[step] = beyond = rewards[step] + discount * beyond
    return returns


class A2C:
    """Actor, critic and their optimiser.

    Args:
        seed: of the initial parameters.

    Attributes:
        updates: made so far; one for each episode.
    """

    def __init__(self, spec: RobotSpec, config: Config, seed: int) -> None:
        self.spec = spec
        self.config = config
        self.updates = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = _perceptron(spec.observation_size, config.network.hidden, spec.action_size)
            self.critic = _perceptron(spec.observation_size, config.network.hidden, 1)
        self._networks = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        self._adam = torch.optim.Adam(self._networks.parameters(), config.learner.learning_rate)

    def logits(self, observations: Tensor) -> Tensor:
        """float32[B, A]: those of the categorical policy, within the limits that scores have."""
        logits: Tensor = torch.tanh(self.actor(observations)) * SCORE_LIMIT
        return logits

    def value(self, observation: Float32) -> float:
        """The critic's value of one observation, float32[O]."""
        with torch.no_grad():
            return float(self.critic(torch.from_numpy(observation)))

    def update(self, observations: Float32, actions: NDArray[np.int64], returns: Float32) -> dict[str, float]:
        """One step of Adam on an episode: float32[T, O], the index of each action [T], discounted returns [T].

        Returns:
            The losses, the policy's entropy (nats) and the norm of the actor's gradient before it was clipped.
        """
        config = self.config.a2c
        states, goals = torch.from_numpy(observations), torch.from_numpy(returns)
        log_policy = torch.log_softmax(self.logits(states), 1)
        taken = log_policy.gather(1, torch.from_numpy(actions)[:, None])[:, 0]
        values = self.critic(states)[:, 0]
        advantage = goals - values.detach()
        if len(advantage) > 1:  # of unit size, whatever rewards the task gives
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        actor_loss = -(taken * advantage).mean()
        critic_loss = (goals - values).square().mean()
        entropy = -(log_policy.exp() * log_policy).sum(1).mean()
        for group in self._adam.param_groups:
            group["lr"] = self.config.learner.learning_rate_at(self.updates / config.episodes)
        self._adam.zero_grad()
        (actor_loss + critic_loss - config.entropy * entropy).backward()
        # Each by itself: they share no parameter, and the critic's gradient is that of returns, large and changing.
        norm = nn.utils.clip_grad_norm_(self.actor.parameters(), config.gradient_norm)
        nn.utils.clip_grad_norm_(self.critic.parameters(), config.gradient_norm)
        self._adam.step()
        self.updates += 1
        losses = {"actor_loss": actor_loss, "critic_loss": critic_loss, "entropy": entropy, "gradient_norm": norm}
        return {name: float(value.detach()) for name, value in losses.items()}

    def bundle(self, provenance: Mapping[str, Any]) -> Bundle:
        """The policy: its scores are the logits, so the highest one is the most probable action."""
        linear = [layer for layer in self.actor if isinstance(layer, nn.Linear)]
        tensors = {}
        for index, layer in enumerate(linear):
            for kind in ("weight", "bias"):
                tensors[f"actor.{index}.{kind}"] = getattr(layer, kind).detach().numpy().copy()
        return Bundle(self.spec, self.config.network.hidden, tensors, provenance=provenance)

    def state(self) -> Arrays:
        """Everything :meth:`restore` needs: networks and Adam's moments, by name."""
        arrays = {name: value.numpy().copy() for name, value in self._networks.state_dict().items()}
        for index, moments in self._adam.state_dict()["state"].items():
            arrays |= {f"adam.{index}.{name}": value.numpy().copy() for name, value in moments.items()}
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]], updates: int) -> None:
        """Become the A2C whose :meth:`state` this is.

        Raises:
            BundleError: it is that of other networks.
        """
        adam: dict[int, dict[str, Tensor]] = {}
        networks: dict[str, Tensor] = {}
        for name, array in arrays.items():
            if name.startswith("adam."):
                _, index, moment = name.split(".")
                adam.setdefault(int(index), {})[moment] = torch.from_numpy(array.copy())
            else:
                networks[name] = torch.from_numpy(array.copy())
        try:
            self._networks.load_state_dict(networks)
        except RuntimeError as error:
            raise BundleError(f"A2C state: {' '.join(str(error).split())}") from None
        self._adam.load_state_dict({"state": adam, "param_groups": self._adam.state_dict()["param_groups"]})
        self.updates = updates


class A2CCore:
    """Plays an episode and learns from it, once a call of :meth:`step`, and evaluates now and then."""

    def __init__(self, config: Config) -> None:
        a2c_config.check(config)
        self.config = config
        seeds = [int(word) for word in np.random.SeedSequence(config.seed).generate_state(3, np.uint32)]
        self.environment = tasks.make(config.task, seeds[0])
        self.evaluation_environment = tasks.make(config.task)
        self.a2c = A2C(self.environment.spec, config, seeds[1])
        self.random = np.random.default_rng(seeds[2])
        self.env_steps = 0
        self.best_return = float("-inf")
        self.best: Bundle | None = None  # to be written, until taken
        self.meter = Gauges()
        self.records: list[dict[str, Any]] = []
        self._next_evaluation = config.evaluation.every

    @property
    def done(self) -> bool:
        return self.a2c.updates >= self.config.a2c.episodes or self.env_steps >= self.config.total_steps

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """One episode and one update; there is no input, and ``now`` is in seconds."""
        del inputs
        self.meter.start(now)
        losses = self._learn()
        self.records.append(
            {"kind": "train", "env_steps": self.env_steps, "updates": self.a2c.updates}
            | self.meter.figures(now)
            | losses
        )
        if self.config.evaluation.every and self.env_steps >= self._next_evaluation:
            self._next_evaluation = next_multiple(self.env_steps, self.config.evaluation.every)
            self._evaluate(now)
        return []

    def bundle(self) -> Bundle:
        """The policy as it is now."""
        made = {"version": self.a2c.updates, "updates": self.a2c.updates, "env_steps": self.env_steps}
        facts = {"algorithm": "A2C", "task": self.config.task, "seed": self.config.seed}
        return self.a2c.bundle({**facts, "config": self.config.to_yaml(), **made})

    def _learn(self) -> dict[str, float]:
        """Play one episode with actions drawn from the policy, and learn from it."""
        actor = Actor(self.bundle())
        observations: list[Float32] = []
        actions: list[int] = []
        rewards: list[float] = []
        observation = self.environment.reset()
        while True:
            scores = actor(observation[None])[0].astype(np.float64)
            likely = np.exp(scores - scores.max())
            action = int(self.random.choice(len(scores), p=likely / likely.sum()))
            chosen = np.zeros(len(scores), np.float32)
            chosen[action] = 1
            outcome = self.environment.step(chosen)
            observations.append(observation)
            actions.append(action)
            rewards.append(outcome.reward)
            observation = outcome.observation
            if outcome.terminated or outcome.truncated:
                break
        beyond = 0.0 if outcome.terminated else self.a2c.value(observation)
        returns = discounted(rewards, self.config.learner.discount, beyond)
        self.env_steps += len(rewards)
        self.meter.ended([sum(rewards)])
        return self.a2c.update(np.array(observations), np.array(actions), returns)

    def _evaluate(self, now: float) -> None:
        bundle, asked = self.bundle(), self.config.evaluation
        environment, seed = self.evaluation_environment, self.config.seed + SEED_OFFSET
        played = [item for item in episodes(environment, Actor(bundle), asked.episodes, seed, asked.max_steps) if item]
        record = evaluation_record(
            env_steps=self.env_steps,
            updates=self.a2c.updates,
            wall_s=self.meter.wall(now),
            weights_version=self.a2c.updates,
            returns=[episode.episode_return for episode in played],
            lengths=[episode.length for episode in played],
        )
        self.records.append(record)
        if record["eval_return_mean"] > self.best_return:
            self.best_return, self.best = record["eval_return_mean"], bundle

    def state(self, now: float) -> tuple[Arrays, dict[str, Any]]:
        """Everything :meth:`restore` needs, between two episodes: arrays, and plain JSON values."""
        environment = self.environment.save_state()
        arrays = {f"a2c.{name}": array for name, array in self.a2c.state().items()}
        arrays |= {f"environment.{key}": environment[key] for key in ("random", "actions", "observation")}
        return arrays, {
            "started": environment["started"],
            "random": self.random.bit_generator.state,
            "updates": self.a2c.updates,
            "env_steps": self.env_steps,
            "next_evaluation": self._next_evaluation,
            "best_return": self.best_return if np.isfinite(self.best_return) else None,
            "meter": self.meter.state(now),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`, bit for bit.

        Raises:
            BundleError: the state does not fit the configuration.
        """
        try:
            parts = {key: arrays[f"environment.{key}"] for key in ("random", "actions", "observation")}
            self.environment.restore_state({**parts, "started": scalars["started"]})
            own = {name.removeprefix("a2c."): array for name, array in arrays.items() if name.startswith("a2c.")}
            self.a2c.restore(own, scalars["updates"])
            self.random.bit_generator.state = scalars["random"]
            self.env_steps = scalars["env_steps"]
            self._next_evaluation = scalars["next_evaluation"]
            self.best_return = float("-inf") if scalars["best_return"] is None else scalars["best_return"]
            self.meter.restore(scalars["meter"])
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"checkpoint does not fit this configuration: {type(error).__name__} {error}") from None

    def close(self) -> None:
        self.environment.close()
        self.evaluation_environment.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = node_parser("a2c", "learner", "Train the on-policy baseline, in this one process.")
    return run_node("learner", parser.parse_args(arguments), _train)


def _train(node: Node) -> None:
    config = node.config
    threads.use_threads(1)
    core = A2CCore(config)
    checkpoint.tidy(node.run.checkpoints)
    if saved := checkpoint.load_newest(node.run.checkpoints):
        core.restore(*saved[1:])
        log.info("goes on from %s: %d episodes", saved[0].name, core.a2c.updates)
    every = config.checkpoint.every or sys.maxsize
    next_checkpoint = core.env_steps + every

    def save() -> None:
        arrays, scalars = core.state(time.monotonic())
        checkpoint.save(node.run.checkpoints, core.env_steps, arrays, scalars, config.checkpoint.keep)

    with MetricsWriter(node.run.metrics_file, node.run.tensorboard) as metrics:

        def after() -> bool:
            nonlocal next_checkpoint
            for record in core.records:
                metrics.write(record)
            core.records.clear()
            if core.best:
                core.best.save(node.run.best_file)
                core.best = None
            if core.env_steps >= next_checkpoint:
                next_checkpoint = core.env_steps + every
                save()
            return core.done

        def report() -> Figures:
            now = time.monotonic()
            figures = core.meter.figures(now) | {"env_steps": core.env_steps, "updates": core.a2c.updates}
            return Figures("finished" if core.done else "ready", figures=figures)

        try:
            if not core.done:
                node.spin(core, busy=lambda: True, report=report, after=after)
            node.status(report(), now=True)
            save()
            core.bundle().save(node.run.policy_file)
        finally:
            core.close()


def _perceptron(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


if __name__ == "__main__":
    sys.exit(main())
