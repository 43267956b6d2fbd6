"""Compare TD3 updates per second: our learner, Stable-Baselines3, SBX, and the matrix products alone.

    python benchmarks/learner_peers.py [--networks 400-300] [--threads 2] [--batch 256] [--repetitions 9] [--json]

Two contestants compute only the matrix products of an update: one in fp32, the other in bf16. The table calls the speed
of these products the peak. On a CPU, an update can be faster than its matrix products only by chance. On a GPU, our
update is one CUDA graph, and the products are launched one by one. So a small update can be faster than the peak.

The script needs ``pip install stable-baselines3``. SBX is Stable-Baselines3 in JAX; it needs ``pip install sbx-rl``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sbx_peer import SBX, use_cores

from td3_robot.bench import harness, learner
from td3_robot.bench.example import ACTIONS, OBSERVATIONS, transitions
from td3_robot.bench.learner import STORED, Contestants, Run
from td3_robot.learner.engine.td3 import DTYPES

Product = tuple[int, int, int]
"""A matrix product [m, k] x [k, n]."""


def main() -> int:
    description = (
        "Compare TD3 updates per second: our learner, Stable-Baselines3, SBX, and matrix products alone. "
        "Run nothing else meanwhile."
    )
    options = learner.options("python benchmarks/learner_peers.py", description).parse_args()
    report = learner.measure(options, peers)
    report["machine"] = harness.describe("td3-robot", "torch", "numpy", "stable-baselines3", *SBX)
    for row in report["results"]:
        case = row["network"], row["threads"]
        same = [other for other in report["results"] if (other["network"], other["threads"]) == case]
        speeds = {other["kind"]: other["rounds"] for other in same}
        row |= compare(learner.NETWORKS[row["network"]], options.batch, speeds, row["kind"])
    return harness.show(report, options.json, lines)


def peers(hidden: Sequence[int], batch: int, threads: int, device: str) -> Contestants:
    products_of = {f"products {name}": partial(products_alone, name, hidden, batch, threads, device) for name in DTYPES}
    sbx = {"sbx": partial(stable_baselines_jax, hidden, batch, threads)} if SBX and device == "cpu" else {}
    return {"sb3": partial(stable_baselines3, hidden, batch, threads, device), **sbx, **products_of}


def compare(hidden: Sequence[int], batch: int, speeds: Mapping[str, Sequence[float]], kind: str) -> dict[str, Any]:
    """Compare a contestant with the others. ``speeds``: updates per second of each contestant in each round."""
    alone = f"products {kind.rpartition(' ')[2]}"
    critic, actor = products(hidden, batch)  # every second critic update has an actor update
    gflop = sum(2 * m * k * n for m, k, n in critic + critic + actor) / 2e9
    return {
        "gflops": statistics.median(speeds[kind]) * gflop,
        "over_sb3": harness.ratio(speeds[kind], speeds["sb3"]),
        "over_sbx": harness.ratio(speeds[kind], speeds["sbx"]) if "sbx" in speeds else None,
        "share_of_peak": harness.ratio(speeds[kind], speeds[alone]) if alone in speeds and kind != alone else None,
    }


def stable_baselines3(hidden: Sequence[int], batch: int, threads: int, device: str) -> Run:
    from stable_baselines3 import TD3  # imported lazily: the import takes seconds, and other processes do not need it

    torch.set_num_threads(threads)
    return updates_of(TD3, hidden, batch, device)


def stable_baselines_jax(hidden: Sequence[int], batch: int, threads: int) -> Run:
    use_cores(threads)
    from sbx import TD3

    return updates_of(TD3, hidden, batch, "cpu")  # SBX compiles all updates of a call into one loop


def updates_of(model_class: Any, hidden: Sequence[int], batch: int, device: str) -> Run:
    """Prepare the updates of a TD3 class with the interface of Stable-Baselines3."""
    from stable_baselines3.common.envs import IdentityEnvBox
    from stable_baselines3.common.logger import Logger

    environment = IdentityEnvBox()  # only its spaces are used
    box = type(environment.action_space)
    environment.observation_space = box(-np.inf, np.inf, (OBSERVATIONS,), np.float32)
    environment.action_space = box(-1, 1, (ACTIONS,), np.float32)
    policy = {"net_arch": list(hidden)}
    model = model_class("MlpPolicy", environment, buffer_size=STORED, policy_kwargs=policy, device=device, seed=0)
    model.set_logger(Logger(None, []))
    buffer = model.replay_buffer
    observation, action, reward, next_observation = transitions(STORED)
    buffer.observations[:, 0], buffer.actions[:, 0], buffer.rewards[:, 0] = observation, action, reward
    buffer.next_observations[:, 0] = next_observation
    buffer.full = True
    # As its last step, train() averages the losses in numpy. So train() returns only after the device has finished.
    return lambda updates: model.train(gradient_steps=updates, batch_size=batch)


def lines(report: harness.Report) -> Iterator[str]:
    for row, line in zip(report["results"], learner.lines(report), strict=True):
        share = "" if row["share_of_peak"] is None else f"  {row['share_of_peak']:4.0%} of peak"
        sbx = "" if row["over_sbx"] is None else f"  {row['over_sbx']:5.2f} × sbx"
        yield f"{line}  {row['over_sb3']:5.2f} × sb3{sbx}{share}"


def products_alone(precision: str, hidden: Sequence[int], batch: int, threads: int, device_name: str) -> Run:
    """Prepare updates that compute only matrix products. Each thread computes its share of the updates."""
    device = torch.device(device_name)
    torch.set_num_threads(1)
    critic, actor = products(hidden, batch)
    random = torch.Generator(device).manual_seed(0)

    def operands(product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m, k, n = product
        sizes = ((m, k), (k, n))
        x, y = (torch.randn(size, generator=random, device=device).to(DTYPES[precision]) for size in sizes)
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


def products(hidden: Sequence[int], batch: int) -> tuple[list[Product], list[Product]]:
    """List the matrix products of a critic update, and the additional products of an actor update, for one batch."""

    def forward(sizes: Sequence[int]) -> list[Product]:
        return [(batch, i, o) for i, o in pairwise(sizes)]

    def weight_gradients(sizes: Sequence[int]) -> list[Product]:
        return [(o, batch, i) for i, o in pairwise(sizes)]

    def input_gradients(sizes: Sequence[int]) -> list[Product]:  # of every layer except the first
        return [(batch, o, i) for i, o in pairwise(sizes[1:])]

    actor, critic = [OBSERVATIONS, *hidden, ACTIONS], [OBSERVATIONS + ACTIONS, *hidden, 1]
    one_critic = forward(critic) + forward(critic) + weight_gradients(critic) + input_gradients(critic)
    critic_update = forward(actor) + 2 * one_critic
    action_gradient = [*input_gradients(critic), (batch, hidden[0], ACTIONS)]
    actor_gradients = weight_gradients(actor) + input_gradients(actor)
    return critic_update, forward(actor) + forward(critic) + action_gradient + actor_gradients


if __name__ == "__main__":
    harness.run_script(main)
