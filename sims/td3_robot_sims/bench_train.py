"""``td3-robot bench train``: environment steps per second of a whole training, beside Stable-Baselines3's TD3.

Walker2D, one robot, one update a step, the same networks, batch and learning rate. Ours is ``td3-robot train`` with its
simulator, policy server and learner as processes; with one thread it takes part with a compiled update, too. Theirs is
one process with the published robot. Both make 1,000 uniform steps first, which do not count.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from td3_robot.bench import example, harness
from td3_robot.bench.harness import PEERS, Report, ratio
from td3_robot.bundle import Bundle
from td3_robot.errors import NodeError, UsageError
from td3_robot.learner import compute
from td3_robot.runtime import metrics
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import machine
from td3_robot_sims.quiet import c_output_on_stderr

WARM_UP = 1000  # environment steps
PRECISIONS = ("fp32", "bf16")
_RECORD = 1000  # environment steps between two records of a run's metrics
_PACKAGES = ("td3-robot", "torch", "numpy", "pybullet", "stable-baselines3", "pybullet_envs_gymnasium")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.Options(
        "td3-robot bench train",
        "Measure environment steps per second of a training with all its processes, and of Stable-Baselines3's TD3. "
        "Takes minutes.",
        ("", "--json > train.json", "--threads 1 --steps 10000 --rounds 5"),
    )
    parser.number("--steps", 3000, "N", "environment steps in one turn")
    parser.number("--rounds", 3, "N", "turns of each contestant")
    parser.number("--threads", [1, 2], "N", "numbers of threads")
    parser.number("--hidden", list(example.HIDDEN), "N", "widths of the networks")
    parser.number("--batch", example.BATCH, "N", "batch size")
    parser.add_argument("--no-compile", action="store_true", help="leave out ours with a compiled update (one thread)")
    options = parser.parse(arguments)
    if options.steps % _RECORD:
        raise UsageError(f"--steps is {options.steps}; it must be a multiple of {_RECORD}")
    contestants, missing = _contestants(options)
    speeds = harness.take_turns(
        {key: partial(_announced, key, train) for key, train in contestants.items()}, options.rounds
    )
    # In each round, compare with the faster of theirs, whatever its threads.
    best = [max(made) for made in zip(*(made for (kind, _), made in speeds.items() if kind == "sb3"), strict=True)]
    report: Report = {
        "benchmark": "train",
        "machine": harness.describe(*_PACKAGES),
        "task": "Walker2D",
        "hidden": options.hidden,
        "batch": options.batch,
        "replay_ratio": 1,
        "steps": options.steps,
        "rounds": options.rounds,
        "not_measured": missing,
        "results": [
            {
                "kind": kind,
                "threads": threads,
                **harness.summary("steps_per_s", made),
                "over_faster_sb3": ratio(made, best) if best else None,
            }
            for (kind, threads), made in speeds.items()
        ],
    }
    return harness.show(report, options.json, _lines)


Contestants = dict[tuple[str, int], Callable[[], float]]
"""By kind and threads: makes one training, and returns its environment steps per second."""


def _contestants(options: argparse.Namespace) -> tuple[Contestants, dict[str, str]]:
    """Return the contestants that can run here, and the reason for each that cannot."""
    missing: dict[str, str] = {}
    if lack := harness.not_installed(*PEERS):
        missing["sb3"] = lack
    if problem := compute.bf16_problem():
        missing["bf16"] = f"this {problem}"
    sizes = {"hidden": options.hidden, "batch": options.batch, "steps": options.steps}
    found: Contestants = {}
    for kind, threads in itertools.product(("sb3", *PRECISIONS), options.threads):
        if kind == "sb3" and kind not in missing:
            found[kind, threads] = partial(stable_baselines3, threads=threads, **sizes)
        elif kind not in missing:
            found[kind, threads] = partial(ours, kind, threads=threads, **sizes)
    if 1 in options.threads and not options.no_compile:  # a second thread does not make it faster
        if lack := machine.compiler_lack():
            missing["compiled fp32"] = lack
        else:
            found["compiled fp32", 1] = partial(ours, "fp32", threads=1, compiled=True, **sizes)
    return found, missing


def _announced(key: tuple[str, int], train: Callable[[], float]) -> float:
    """Train, and print the speed on standard error."""
    speed = train()
    print(f"{key[0]}, {key[1]} thread(s): {speed:.1f} steps/s", file=sys.stderr)
    return speed


def ours(
    precision: str, *, threads: int, hidden: Sequence[int], batch: int, steps: int, compiled: bool = False
) -> float:
    """Train with td3-robot; the environment steps per second by the learner's own metrics.

    The first record after the warm-up also covers its end, so the run makes one record more, and this one is left out.

    Raises:
        NodeError: the training failed, or its update was not compiled.
    """
    overrides = {
        "learner.learning_starts": WARM_UP,
        "learner.learning_rate": 0.001,
        "learner.batch_size": batch,
        "learner.replay_ratio": 1,
        "learner.precision": precision,
        "learner.threads": threads,
        "learner.compile": str(compiled).lower(),
        "learner.layer_norm": False,
        "network.hidden": list(hidden),
        "simulators": 1,
        "robots": 1,
        "evaluation.every": 0,
        "checkpoint.every": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        command = [sys.executable, "-m", "td3_robot.cli.main", "train", "walker2d", "--out", str(run.path)]
        command += ["--steps", str(WARM_UP + _RECORD + steps)]
        command += [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["no message"]
            raise NodeError(f"the training in {precision} failed: {words[-1]}")
        if compiled and not Bundle.load(run.policy_file).provenance["compiled"]:
            log = (run.logs / "learner.log").read_text("utf-8").splitlines()
            why = next((line for line in log if "not compiled" in line), "its log does not say why")
            raise NodeError(f"the update was not compiled: {why}; --no-compile leaves this contestant out")
        records = [item for item in metrics.read(run.metrics_file, "train") if item["env_steps"] >= WARM_UP + _RECORD]
    first, last = records[0], records[-1]
    return float((last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]))


def stable_baselines3(*, threads: int, hidden: Sequence[int], batch: int, steps: int) -> float:
    """Train with Stable-Baselines3 in a process with its own threads; the environment steps per second.

    Raises:
        NodeError: the process died.
    """
    with harness.Worker("sb3", _their_training, threads, list(hidden), batch, steps) as worker:
        seconds: float = worker.receive()
    return steps / seconds


def _their_training(pipe: Connection, threads: int, hidden: list[int], batch: int, steps: int) -> None:
    warnings.simplefilter("ignore")  # their packages warn about each other
    with c_output_on_stderr():
        torch: Any = importlib.import_module("torch")
        importlib.import_module("pybullet_envs_gymnasium")  # registers its robots
        gymnasium: Any = importlib.import_module("gymnasium")
        sb3: Any = importlib.import_module("stable_baselines3")
        torch.set_num_threads(threads)
        model = sb3.TD3(
            "MlpPolicy", gymnasium.make("Walker2DBulletEnv-v0"), learning_rate=1e-3, learning_starts=WARM_UP,
            batch_size=batch, train_freq=1, gradient_steps=1, buffer_size=1_000_000,
            policy_kwargs={"net_arch": hidden}, device="cpu", seed=0,
        )  # fmt: skip
        model.learn(WARM_UP)
        begin = time.perf_counter()
        model.learn(steps, reset_num_timesteps=False)
        pipe.send(time.perf_counter() - begin)


def _lines(report: Report) -> Iterator[str]:
    width = max((len(row["kind"]) for row in report["results"]), default=0)
    for row in report["results"]:
        text = f"{row['kind']:{width}}  {row['threads']} thread(s) {row['steps_per_s']:8.1f} steps/s"
        text += f" [{row['lowest']:.1f}, {row['highest']:.1f}]"
        over = row["over_faster_sb3"]
        yield text + ("" if over is None else f"  {over:5.2f} × the faster sb3")
