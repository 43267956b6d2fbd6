"""Batches, configurations and views of weights for the tests of TD3 and its engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.ddpg import DDPG
from td3_robot.learner.algorithms.td3 import TD3
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.replay_buffer.buffer import Batch, ReplayBuffer

O, A, B = 5, 3, 32  # noqa: E741 - observation, action and batch size, as in the docstrings

Weights = dict[str, NDArray[np.float64]]

CONFIGS = {
    "as published": LearnerConfig(learning_rate=1e-3),
    "layer norm": LearnerConfig(learning_rate=1e-3, layer_norm=True),
    "two threads": LearnerConfig(learning_rate=1e-3, layer_norm=True, threads=2),
    "other constants": LearnerConfig(
        learning_rate=3e-4, polyak=0.1, target_noise=0.5, target_noise_clip=0.3, policy_delay=3
    ),
    "DDPG": LearnerConfig(algorithm="ddpg", twin_critics=False, target_noise=0.0, policy_delay=1, learning_rate=1e-3),
    "one critic": LearnerConfig(twin_critics=False, learning_rate=1e-3),
    "no smoothing": LearnerConfig(target_noise=0.0, learning_rate=1e-3),
    "no delay": LearnerConfig(policy_delay=1, learning_rate=1e-3),
    "Huber": LearnerConfig(critic_loss="huber", learning_rate=1e-3),
    "clipped": LearnerConfig(gradient_clip=0.2, learning_rate=1e-3),
    "average": LearnerConfig(policy_average=0.1, learning_rate=1e-3),
    "critics first": LearnerConfig(critics_first=5, learning_rate=1e-3),
    "all at once": LearnerConfig(
        critic_loss="huber", gradient_clip=0.3, layer_norm=True, policy_delay=1, learning_rate=1e-3
    ),
}


def batches(count: int, seed: int, size: int = B) -> list[Batch]:
    """Return random batches. About a quarter of the transitions terminate. The others have discounts from 0.9 to 1."""
    print(f"batches from seed {seed}")
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    def uniform(*shape: int) -> Tensor:
        return torch.from_numpy(random.uniform(-1, 1, shape).astype(np.float32))

    def discounts() -> Tensor:
        discount = random.uniform(0.9, 1, (size, 1)) * (random.random((size, 1)) > 0.25)
        return torch.from_numpy(discount.astype(np.float32))

    return [
        Batch(normal(size, O), uniform(size, A), normal(size, 1), normal(size, O), discounts()) for _ in range(count)
    ]


def filled_buffer(device: torch.device | None = None) -> ReplayBuffer:
    """Return a buffer with 100 random transitions. If ``device`` is given, this device holds a copy of the buffer."""
    random = np.random.default_rng(1)
    buffer = ReplayBuffer(100, O, A, seed=2)
    if device:
        buffer.use_device(device)

    def normal(*shape: int) -> Any:
        return random.standard_normal((100, *shape)).astype(np.float32)

    buffer.add(normal(O), np.tanh(normal(A)), normal(), normal(O), (random.random(100) < 0.8).astype(np.float32))
    return buffer


def noise_to_come(algorithm: Algorithm) -> Tensor:
    """Return the standard normal numbers float32[B, A] that the next update will draw."""
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(algorithm.state()[0]["generator"]))
    return torch.randn((B, A), generator=generator)


def tensors_of(td3: Algorithm, role: str = "online") -> dict[str, Tensor]:
    """The tensors of all networks, with names such as ``critic1.0.weight``. These are not copies.

    Args:
        td3: the plain algorithm or its engine.
        role: online, target, adam_mean or adam_square. The last two are the moments of the optimisers.
    """
    if isinstance(td3, FastTD3):
        named = td3.tensors()
        return {name.removeprefix(f"{role}/"): named[name] for name in named if name.startswith(f"{role}/")}
    assert isinstance(td3, TD3)
    actor, critics = (td3.actor_target, td3.critics_target) if role == "target" else (td3.actor, td3.critics)
    heads = {"actor": actor} | {f"critic{number}": critic for number, critic in enumerate(critics, 1)}
    found = {name: parameter for head, network in heads.items() for name, parameter in parameters_of(network, head)}
    if role not in ("adam_mean", "adam_square"):
        return {name: parameter.data for name, parameter in found.items()}
    kept = {**td3.actor_optimiser.state, **td3.critics_optimiser.state}
    moment = {"adam_mean": "exp_avg", "adam_square": "exp_avg_sq"}[role]
    zero = torch.zeros(1)
    return {name: kept[parameter][moment] if parameter in kept else zero for name, parameter in found.items()}


def weights_of(td3: Algorithm, role: str = "online") -> Weights:
    """Return a copy of :func:`tensors_of` in float64."""
    return {name: tensor.cpu().numpy().astype(np.float64) for name, tensor in tensors_of(td3, role).items()}


@torch.no_grad()
def actions(td3: Any, observation: Tensor) -> Tensor:
    """Return π(s): float32[B, A]."""
    pi: Tensor = td3.actor.forward(observation)[0].tanh() if isinstance(td3, FastTD3) else td3.actor(observation)
    return pi


def distance(one: Weights, other: Weights) -> float:
    """Return the largest difference between two weights of the same name and position."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


class Exact:
    """The plain TD3 or DDPG in float64, with the weights and random numbers of an engine.

    Args:
        engine: the engine to copy. It must not have made an update yet.
    """

    def __init__(self, engine: FastTD3) -> None:
        kind = DDPG if engine.config.algorithm == "ddpg" else TD3
        self.td3 = kind(engine.observation_size, engine.action_size, engine.hidden, engine.config, seed=0)
        self.td3.random.set_state(engine.random.get_state())
        for module in (value for value in vars(self.td3).values() if isinstance(value, nn.Module)):
            module.double()
        for role in ("online", "target"):
            ours, theirs = tensors_of(self.td3, role), tensors_of(engine, role)
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])

    def learn(self, batch: Batch) -> list[Tensor]:
        """Make one update with this batch. Return one tensor of TD errors for each critic."""
        return list(self.td3.learn(Batch(*(tensor.double() for tensor in batch))))


def parameters_of(network: nn.Sequential, head: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a perceptron. Their names and their order are the same as in the engine."""
    index = -1
    for layer in network:
        if isinstance(layer, nn.Linear):
            index += 1
            yield from ((f"{head}.{index}.weight", layer.weight), (f"{head}.{index}.bias", layer.bias))
        elif isinstance(layer, nn.LayerNorm):
            yield from ((f"{head}.{index}.scale", layer.weight), (f"{head}.{index}.shift", layer.bias))
