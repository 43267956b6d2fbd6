"""How many TD3 updates a second the learner makes, beside Stable-Baselines3 in the same run.

    python benchmarks/learner_speed.py [--repetitions 5] [--seconds 1.5] [--json]

Batches of 256 from a full buffer of 200,000 random transitions of the Walker2D sizes (22 observations, 6 actions);
sampling included. Every variant has its own process and number of threads; they take turns, so that a change in the
machine's load meets all of them, and the median over the turns is reported. Needs the ``dev`` extra, and cores that
nobody else uses: with as many threads as cores, one busy neighbour makes all variants, sb3 too, ten times slower.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

OBSERVATIONS, ACTIONS, BATCH, STORED = 22, 6, 256, 200_000
NETWORKS = {"400-300": (400, 300), "256-256": (256, 256)}
KINDS = ("sb3", "fp32", "bf16", "bf16 + layer norm")
WARM_UP = 20  # updates


def ours(kind: str, hidden: tuple[int, ...], threads: int) -> Callable[[int], None]:
    import numpy as np

    from td3_robot.config import LearnerConfig
    from td3_robot.learner.replay import ReplayBuffer
    from td3_robot.learner.td3 import TD3

    precision, _, norm = kind.partition(" + ")
    config = LearnerConfig(
        precision=precision,  # type: ignore[arg-type]
        layer_norm=bool(norm),
        learning_rate=1e-3,
        threads=threads,
    )
    td3 = TD3(OBSERVATIONS, ACTIONS, hidden, config, seed=0)
    buffer = ReplayBuffer(STORED, OBSERVATIONS, ACTIONS, seed=0)
    buffer.add(*transitions(), np.full(STORED, 0.99, np.float32))

    def run(updates: int) -> None:
        for _ in range(updates):
            td3.update(buffer.sample(BATCH))
        td3.metrics()

    return run


def sb3(hidden: tuple[int, ...]) -> Callable[[int], None]:
    import gymnasium
    import numpy as np
    from stable_baselines3 import TD3
    from stable_baselines3.common.logger import Logger

    class Nothing(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBSERVATIONS,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    policy = {"net_arch": list(hidden)}
    td3 = TD3("MlpPolicy", Nothing(), buffer_size=STORED, batch_size=BATCH, policy_kwargs=policy, device="cpu", seed=0)
    td3.set_logger(Logger(None, []))
    buffer: Any = td3.replay_buffer
    observation, action, reward, next_observation = transitions()
    buffer.observations[:, 0], buffer.actions[:, 0], buffer.rewards[:, 0] = observation, action, reward
    buffer.next_observations[:, 0] = next_observation
    buffer.full = True
    return lambda updates: td3.train(gradient_steps=updates, batch_size=BATCH)


def transitions() -> tuple[Any, Any, Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal((STORED, *shape), np.float32)

    return normal(OBSERVATIONS), np.tanh(normal(ACTIONS)), normal(), normal(OBSERVATIONS)


def worker(pipe: Connection, kind: str, hidden: tuple[int, ...], threads: int) -> None:
    """Answers each number of seconds with updates per second, until None comes."""
    import torch

    from td3_robot.learner import compute

    if kind == "sb3":
        torch.set_num_threads(threads)
        run = sb3(hidden)
    else:
        compute.use_threads(threads)
        run = ours(kind, hidden, threads)
    run(WARM_UP)
    pipe.send(torch.__version__)
    while (seconds := pipe.recv()) is not None:
        run(2)  # caches and clock frequency back
        updates, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            run(20)
            updates += 20
        pipe.send(updates / elapsed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each variant")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a turn")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: list[dict[str, Any]] = []
    version, load = "", os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is not idle: load average {load:.1f}", file=sys.stderr)
    for network in arguments.networks:
        for threads in arguments.threads:
            pipes = {}
            for kind in KINDS:
                pipes[kind], theirs = context.Pipe()
                context.Process(target=worker, args=(theirs, kind, NETWORKS[network], threads), daemon=True).start()
                theirs.close()  # so that a worker's death ends the wait for it
                version = pipes[kind].recv()
            speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(arguments.repetitions):
                for kind, pipe in pipes.items():
                    pipe.send(arguments.seconds)
                    speeds[kind].append(pipe.recv())
            for kind, pipe in pipes.items():
                pipe.send(None)
                results.append(
                    {
                        "network": network,
                        "threads": threads,
                        "kind": kind,
                        "updates_per_s": statistics.median(speeds[kind]),
                        "lowest": min(speeds[kind]),
                        "highest": max(speeds[kind]),
                        "times_sb3": statistics.median(a / b for a, b in zip(speeds[kind], speeds["sb3"], strict=True)),
                    }
                )
            if not arguments.json:
                for row in results[-len(KINDS) :]:
                    print(
                        f"{row['network']}  {row['threads']} thread(s)  {row['kind']:18s}"
                        f"{row['updates_per_s']:7.1f}/s  [{row['lowest']:.1f}, {row['highest']:.1f}]"
                        f"  {row['times_sb3']:5.2f} x sb3",
                        flush=True,
                    )
    if arguments.json:
        machine = {
            "processor": processor(),
            "cores": multiprocessing.cpu_count(),
            "torch": version,
            "load_before": load,
        }
        print(json.dumps({"batch": BATCH, "machine": machine, "results": results}, indent=2))


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
