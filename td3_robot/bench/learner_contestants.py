"""The contestants of ``td3-robot bench learner``: each is a function that makes so many updates."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from td3_robot.bench.example import ACTIONS, BATCH, OBSERVATIONS, transitions
from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.engine import selection
from td3_robot.learner.engine.td3 import DTYPES
from td3_robot.learner.engine.threads import ThreadsIn, use_threads
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.learner.replay_buffer.device import DeviceReplay

STORED = 200_000  # transitions in each replay buffer

Run = Callable[[int], None]
"""Makes so many updates, and returns when the last one is done."""
Product = tuple[int, int, int]
"""A matrix product [m, k] x [k, n]."""


class LacksError(Exception):
    """This machine lacks what a contestant needs; the message says what."""


def contestant(kind: str, *, hidden: Sequence[int], threads: int, device: str, layer_norm: bool) -> Run:
    """Make a contestant. It uses all threads of this process.

    Args:
        kind: ``sb3`` is Stable-Baselines3. ``fp32`` and ``bf16`` are ours with the critics side by side in two threads.
            ``operators fp32`` is ours with all threads inside operators. ``compiled fp32`` is the same with a compiled
            update, see :mod:`td3_robot.learner.engine.compiled`. ``products fp32`` makes only the matrix products.

    Raises:
        LacksError: the contestant cannot run here.
    """
    if kind == "sb3":
        torch.set_num_threads(threads)
        return stable_baselines3(hidden, device)
    name, _, precision = kind.rpartition(" ")
    if name == "products":
        torch.set_num_threads(1)
        return products_alone(hidden, threads, DTYPES[precision], torch.device(device))
    where: ThreadsIn = "operators" if name in ("operators", "compiled") else "critics"
    use_threads(threads, where)
    config = LearnerConfig(
        precision=precision,  # type: ignore[arg-type]
        threads=threads,
        threads_in=where,
        device=device,  # type: ignore[arg-type]
        compile=name == "compiled",
        layer_norm=layer_norm,
        learning_rate=1e-3,
    )
    return ours(hidden, config, torch.device(device))


def ours(hidden: Sequence[int], config: LearnerConfig, device: torch.device) -> Run:
    algorithm = selection.make(OBSERVATIONS, ACTIONS, hidden, config, seed=0, device=device)
    host = ReplayBuffer(STORED, OBSERVATIONS, ACTIONS, seed=0)
    algorithm.prepare(host.example(BATCH))
    if config.compile and not algorithm.compiled:
        raise LacksError("the update cannot be compiled; the log has the reason")
    buffer = DeviceReplay(host, device) if device.type == "cuda" else host
    buffer.add(*transitions(STORED), np.ones(STORED, np.float32))

    def run(updates: int) -> None:
        for _ in range(updates):
            algorithm.learn(buffer.sample(BATCH))
        algorithm.metrics()  # waits for the device

    return run


def stable_baselines3(hidden: Sequence[int], device: str) -> Run:
    sb3: Any = importlib.import_module("stable_baselines3")
    environments: Any = importlib.import_module("stable_baselines3.common.envs")
    logger: Any = importlib.import_module("stable_baselines3.common.logger")
    environment = environments.IdentityEnvBox()  # only its spaces are used
    box = type(environment.action_space)
    environment.observation_space = box(-np.inf, np.inf, (OBSERVATIONS,), np.float32)
    environment.action_space = box(-1, 1, (ACTIONS,), np.float32)
    policy = {"net_arch": list(hidden)}
    model = sb3.TD3("MlpPolicy", environment, buffer_size=STORED, policy_kwargs=policy, device=device, seed=0)
    model.set_logger(logger.Logger(None, []))
    buffer = model.replay_buffer
    observation, action, reward, next_observation = transitions(STORED)
    buffer.observations[:, 0], buffer.actions[:, 0], buffer.rewards[:, 0] = observation, action, reward
    buffer.next_observations[:, 0] = next_observation
    buffer.full = True
    # train() averages its losses in numpy at its end, which waits for the device.
    return lambda updates: model.train(gradient_steps=updates, batch_size=BATCH)


def products_alone(hidden: Sequence[int], threads: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Make the matrix products of an update and nothing else; each thread makes its share of the updates."""
    critic, actor = products(hidden)
    random = torch.Generator(device).manual_seed(0)

    def operands(product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m, k, n = product
        x, y = (torch.randn(size, generator=random, device=device).to(dtype) for size in ((m, k), (k, n)))
        return x, y, x @ y

    def share(made: tuple[list[Any], list[Any]], updates: int) -> None:
        for number in range(updates):
            for x, y, out in made[0] + made[1] if number % 2 else made[0]:
                torch.mm(x, y, out=out)

    made = [([operands(p) for p in critic], [operands(p) for p in actor]) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(updates: int) -> None:
        list(pool.map(share, made, [-(-updates // threads)] * threads))
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def products(hidden: Sequence[int]) -> tuple[list[Product], list[Product]]:
    """List the matrix products of a critic update, and those that an actor update adds, for one batch."""

    def forward(sizes: Sequence[int]) -> list[Product]:
        return [(BATCH, i, o) for i, o in pairwise(sizes)]

    def weight_gradients(sizes: Sequence[int]) -> list[Product]:
        return [(o, BATCH, i) for i, o in pairwise(sizes)]

    def input_gradients(sizes: Sequence[int]) -> list[Product]:  # of every layer but the first
        return [(BATCH, o, i) for i, o in pairwise(sizes[1:])]

    actor, critic = [OBSERVATIONS, *hidden, ACTIONS], [OBSERVATIONS + ACTIONS, *hidden, 1]
    one_critic = forward(critic) + forward(critic) + weight_gradients(critic) + input_gradients(critic)
    critic_update = forward(actor) + 2 * one_critic
    action_gradient = [*input_gradients(critic), (BATCH, hidden[0], ACTIONS)]
    actor_gradients = weight_gradients(actor) + input_gradients(actor)
    return critic_update, forward(actor) + forward(critic) + action_gradient + actor_gradients
