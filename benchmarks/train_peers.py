"""Compare td3-robot with the TD3 of Stable-Baselines3 and SBX: environment steps per second of a whole training.

    python benchmarks/train_peers.py [--threads 1 2] [--steps 3000] [--rounds 3] [--json]

All contestants train Walker2D with one robot, one update per environment step, and the same networks, batch size and
learning rate. Stable-Baselines3 and SBX each train in one process, with the robot of pybullet_envs_gymnasium.

The script needs ``pip install stable-baselines3 pybullet_envs_gymnasium``, and for SBX ``pip install sbx-rl``.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sbx_peer import SBX, use_cores
from td3_robot_sims.quiet import stdout_to_stderr

from td3_robot.bench import harness, train
from td3_robot.bench.train import RECORD, WARM_UP, Contestants

_PEERS = ("stable-baselines3", "pybullet_envs_gymnasium")


def main() -> int:
    description = "Compare the training speeds of td3-robot, Stable-Baselines3 and SBX, all with TD3. Takes minutes."
    options = train.options("python benchmarks/train_peers.py", description).parse_args()
    report = train.measure(options, peers)
    report["machine"] = harness.describe("td3-robot", "torch", "numpy", "pybullet", *_PEERS, *SBX)
    compare(report["results"])
    return harness.show(report, options.json, lines)


def peers(*, threads: Sequence[int], **sizes: Any) -> Contestants:
    packages = ("sb3", "sbx") if SBX else ("sb3",)
    return {(name, count): partial(peer, name, threads=count, **sizes) for name in packages for count in threads}


def compare(results: list[dict[str, Any]]) -> None:
    """Compare the speed of each contestant with the highest speed of Stable-Baselines3 in the same round.

    The highest speed is the maximum over all numbers of threads.
    """
    best = [max(made) for made in zip(*(row["rounds"] for row in results if row["kind"] == "sb3"), strict=True)]
    for row in results:
        row["over_faster_sb3"] = harness.ratio(row["rounds"], best)


def lines(report: harness.Report) -> Iterator[str]:
    for row, line in zip(report["results"], train.lines(report), strict=True):
        yield f"{line}  {row['over_faster_sb3']:5.2f} × the faster sb3"


def peer(name: str, *, threads: int, hidden: Sequence[int], batch: int, steps: int) -> float:
    """Train with another package in a separate process; return the environment steps per second."""
    with harness.process_of(name) as call:
        seconds: float = call(_their_training, name, threads, list(hidden), batch, steps)
    return steps / seconds


def _their_training(name: str, threads: int, hidden: list[int], batch: int, steps: int) -> float:
    """Train, and return the seconds for ``steps`` steps."""
    warnings.simplefilter("ignore")  # the packages imported below warn about each other
    with stdout_to_stderr():
        import gymnasium
        import pybullet_envs_gymnasium  # noqa: F401  registers its robots
        import torch

        if name == "sbx":
            use_cores(threads)
        td3: Any = importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[name]).TD3
        torch.set_num_threads(threads)
        model = td3(
            "MlpPolicy", gymnasium.make("Walker2DBulletEnv-v0"), learning_rate=1e-3, learning_starts=WARM_UP,
            batch_size=batch, train_freq=1, gradient_steps=1, buffer_size=1_000_000,
            policy_kwargs={"net_arch": hidden}, device="cpu", seed=0,
        )  # fmt: skip
        # The first call of learn() is not measured, because SBX compiles at its first updates. train.ours() also leaves
        # out its first WARM_UP + RECORD steps.
        model.learn(WARM_UP + RECORD)
        begin = time.perf_counter()
        model.learn(steps, reset_num_timesteps=False)
        return time.perf_counter() - begin


if __name__ == "__main__":
    harness.run_script(main)
