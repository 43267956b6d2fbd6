"""``td3-robot bench train``: environment steps a second of a whole training, beside Stable-Baselines3's TD3.

Walker2D, one robot, one update a step, the same networks, batch and learning rate. Ours is ``td3-robot train`` with its
simulator, policy server and learner as processes, with one thread also with a compiled update; theirs is one process
with the published robot. Both make 1,000 uniform steps first; what is measured is what comes after. Contestants take
turns: a figure is the median over the rounds, a ratio the median of the ratios within one round.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from td3_robot.bench.learner import PRECISIONS, ratio
from td3_robot.bundle import Bundle
from td3_robot.errors import NodeError, UsageError
from td3_robot.learner import compute
from td3_robot.runtime import learning_curve as curve
from td3_robot.runtime.node import Parser
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import machine
from td3_robot_sims.quiet import c_output_on_stderr

WARM_UP = 1000  # environment steps
_RECORD = 1000  # environment steps between two records of a run's metrics
_THEIR_PACKAGES = {"stable_baselines3": "stable-baselines3", "pybullet_envs_gymnasium": "pybullet_envs_gymnasium"}

_EXAMPLES = """examples:
  td3-robot bench train
  td3-robot bench train --json > train.json
  td3-robot bench train --threads 1 --steps 10000 --rounds 5
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot bench train",
        description="Measure environment steps a second of a training with all its processes, and of "
        "Stable-Baselines3's TD3. Takes minutes.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--steps", type=int, default=3000, metavar="N", help="measured, of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    parser.add_argument("--hidden", type=int, nargs="+", default=[400, 300], metavar="N", help="default: 400 300")
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--no-compile", action="store_true", help="leave out ours with a compiled update (one thread)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for name, low in (("steps", 1), ("rounds", 1), ("threads", 1), ("hidden", 1), ("batch", 1)):
        given = getattr(options, name)
        if (lowest := min(given) if isinstance(given, list) else given) < low:
            raise UsageError(f"--{name} is {lowest}; it must be at least {low}")
    if options.steps % _RECORD:
        raise UsageError(f"--steps is {options.steps}; it must be a multiple of {_RECORD}")
    report = measure(options)
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole report, as plain JSON values."""
    contestants, missing = _contestants(options)
    theirs = [package for module, package in _THEIR_PACKAGES.items() if importlib.util.find_spec(module)]
    report = {
        "benchmark": "train",
        "machine": machine.describe(("td3-robot", "torch", "numpy", "pybullet", *theirs)),
        "task": "Walker2D",
        "hidden": options.hidden,
        "batch": options.batch,
        "replay_ratio": 1,
        "steps": options.steps,
        "rounds": options.rounds,
        "not_measured": missing,
    }
    speeds: dict[tuple[str, int], list[float]] = {key: [] for key in contestants}
    keys = list(contestants)
    for number in range(options.rounds):
        for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
            speeds[key].append(contestants[key]())
            print(f"{key[0]}, {key[1]} thread(s): {speeds[key][-1]:.1f} steps/s", file=sys.stderr)
    # Beside the faster of theirs in each round, whatever its threads.
    best = [max(made) for made in zip(*(made for (kind, _), made in speeds.items() if kind == "sb3"), strict=True)]
    report["results"] = [
        {
            "kind": kind,
            "threads": threads,
            "steps_per_s": statistics.median(made),
            "lowest": min(made),
            "highest": max(made),
            "over_faster_sb3": ratio(made, best or None),
        }
        for (kind, threads), made in speeds.items()
    ]
    return report


Contestants = dict[tuple[str, int], Callable[[], float]]
"""By kind and threads: makes one training, and returns its environment steps a second."""


def _contestants(options: argparse.Namespace) -> tuple[Contestants, dict[str, str]]:
    """Who takes part, and who cannot and why."""
    missing: dict[str, str] = {}
    for module, package in _THEIR_PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            missing["sb3"] = f"{package} is not installed; pip install {package}"
    if problem := compute.bf16_problem():
        missing["bf16"] = f"this {problem}"
    lack = machine.compiler_lack()
    compiled = 1 in options.threads and not options.no_compile  # it has no use for a second
    if compiled and lack:
        missing["compiled fp32"] = lack
    sizes = {"hidden": options.hidden, "batch": options.batch, "steps": options.steps}
    found: Contestants = {}
    for kind, threads in itertools.product(("sb3", *PRECISIONS), options.threads):
        if kind == "sb3" and kind not in missing:
            found[kind, threads] = lambda threads=threads: stable_baselines3(threads=threads, **sizes)  # type: ignore[misc]
        elif kind not in missing:
            found[kind, threads] = lambda kind=kind, threads=threads: ours(kind, threads=threads, **sizes)  # type: ignore[misc]
    if compiled and not lack:
        found["compiled fp32", 1] = lambda: ours("fp32", threads=1, compiled=True, **sizes)
    return found, missing


def ours(
    precision: str, *, threads: int, hidden: Sequence[int], batch: int, steps: int, compiled: bool = False
) -> float:
    """By the learner's own metrics: the first record after the warm-up holds its end, so one more is made.

    Raises:
        NodeError: the training failed.
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
            said = (run.logs / "learner.log").read_text("utf-8").splitlines()
            why = next((line for line in said if "not compiled" in line), "its log does not say why")
            raise NodeError(f"the compiled contestant did not compile: {why}; --no-compile leaves it out")
        records = [item for item in curve.read(run.metrics_file, "train") if item["env_steps"] >= WARM_UP + _RECORD]
    first, last = records[0], records[-1]
    return float((last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]))


def stable_baselines3(*, threads: int, hidden: Sequence[int], batch: int, steps: int) -> float:
    """In a process of its own, which has the threads for itself.

    Raises:
        NodeError: it died.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_their_training, args=(there, threads, list(hidden), batch, steps), daemon=True)
    process.start()
    there.close()  # so that its death ends the wait for it
    try:
        seconds: float = here.recv()
    except EOFError:
        raise NodeError("the process of 'sb3' died; what it printed says why") from None
    process.join()
    return steps / seconds


def _their_training(pipe: Connection, threads: int, hidden: list[int], batch: int, steps: int) -> None:
    warnings.simplefilter("ignore")  # theirs, about each other
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


def _text(report: Mapping[str, Any]) -> str:
    computer = report["machine"]
    lines = [f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before"]
    lines += [f"not measured: {kind}: {reason}" for kind, reason in report["not_measured"].items()]
    width = max((len(row["kind"]) for row in report["results"]), default=0)
    for row in report["results"]:
        text = f"{row['kind']:{width}}  {row['threads']} thread(s) {row['steps_per_s']:8.1f} steps/s"
        text += f" [{row['lowest']:.1f}, {row['highest']:.1f}]"
        over = row["over_faster_sb3"]
        lines.append(text + ("" if over is None else f"  {over:5.2f} × the faster sb3"))
    return "\n".join(lines)
