"""``td3-robot bench train``: environment steps per second of a whole training on this machine.

The training uses Walker2D, one robot and one update per step. Each measurement runs ``td3-robot train`` with all
its processes except the evaluator. The benchmark does not measure the first 2,000 steps: the warm-up of 1,000 steps,
and 1,000 steps after it.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from td3_robot.bench import example, harness
from td3_robot.bench.harness import Report
from td3_robot.bench.learner import lack
from td3_robot.bundle import Bundle
from td3_robot.errors import NodeError, UsageError
from td3_robot.runtime import metrics
from td3_robot.runtime.run_folder import RunFolder

WARM_UP = 1000  # environment steps
RECORD = 1000  # environment steps between two records of a run's metrics; also the unmeasured steps after the warm-up

Contestants = dict[tuple[str, int], Callable[[], float]]
"""Maps kind and number of threads to a function that trains once and returns the environment steps per second."""


def main(arguments: Sequence[str]) -> int:
    description = "Measure environment steps per second of a training with all its processes. Takes minutes."
    given = options("td3-robot bench train", description).parse_args(arguments)
    return harness.show(measure(given), given.json, lines)


def options(command: str, description: str) -> harness.Options:
    parser = harness.Options(command, description, ("", "--json > train.json", "--threads 1 --steps 10000 --rounds 5"))
    parser.number("--steps", 3000, "N", "environment steps in one measurement")
    parser.number("--rounds", 3, "N", "measurements of each variant")
    parser.number("--threads", [1, 2], "N", "measure with each of these numbers of threads")
    parser.number("--hidden", list(example.HIDDEN), "N", "widths of the networks")
    parser.number("--batch", example.BATCH, "N", "batch size")
    parser.add_argument("--no-compile", action="store_true", help="leave out compiled updates")
    return parser


def measure(options: argparse.Namespace, others: Callable[..., Contestants] = lambda **_: {}) -> Report:
    """Measure every kind of training with each number of threads.

    ``others`` returns additional contestants. Its arguments are ``threads``, ``hidden``, ``batch`` and ``steps``.

    Raises:
        UsageError: the number of steps is not a multiple of :data:`RECORD`.
        NodeError: a training failed.
    """
    if options.steps % RECORD:
        raise UsageError(f"--steps is {options.steps}; it must be a multiple of {RECORD}")
    sizes = {"hidden": options.hidden, "batch": options.batch, "steps": options.steps}
    contestants = others(threads=options.threads, **sizes)
    precisions = ("fp32", "bf16") if options.no_compile else ("fp32", "bf16", "compiled fp32", "compiled bf16")
    kinds = list(itertools.product(precisions, options.threads))
    missing = {kind: reason for kind, _ in kinds if (reason := lack(kind))}
    for kind, threads in kinds:
        if kind not in missing:
            contestants[kind, threads] = partial(ours, kind, threads=threads, **sizes)
    turns = {key: partial(_announced, key, train) for key, train in contestants.items()}
    speeds = harness.take_turns(turns, options.rounds)
    return {
        "benchmark": "train",
        "machine": harness.describe("td3-robot", "torch", "numpy", "pybullet"),
        "task": "Walker2D",
        "replay_ratio": 1,
        "rounds": options.rounds,
        "not_measured": missing,
        **sizes,
        "results": [
            {"kind": kind, "threads": threads, **harness.summary("steps_per_s", made)}
            for (kind, threads), made in speeds.items()
        ],
    }


def _announced(key: tuple[str, int], train: Callable[[], float]) -> float:
    """Train, and print the speed on standard error."""
    speed = train()
    print(f"{key[0]}, {key[1]} thread(s): {speed:.1f} steps/s", file=sys.stderr)
    return speed


def ours(kind: str, *, threads: int, hidden: Sequence[int], batch: int, steps: int) -> float:
    """Train with td3-robot. Return the environment steps per second from the metrics of the learner.

    The learner makes the first record at the end of the warm-up. The measurement begins at the second record.

    Raises:
        NodeError: the training failed, or its update was not compiled.
    """
    compiled, precision = "compiled" in kind, kind.split()[-1]
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
        command += ["--steps", str(WARM_UP + RECORD + steps)]
        command += [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["no message"]
            raise NodeError(f"the training in {kind} failed: {words[-1]}")
        if compiled and not Bundle.load(run.policy_file).provenance["compiled"]:
            log = (run.logs / "learner.log").read_text("utf-8").splitlines()
            why = next((line for line in log if "not compiled" in line), "the learner's log gives no reason")
            raise NodeError(f"the update was not compiled: {why}; to leave out compiled updates, add --no-compile")
        records = [item for item in metrics.read(run.metrics_file, "train") if item["env_steps"] >= WARM_UP + RECORD]
    first, last = records[0], records[-1]
    return float((last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]))


def lines(report: Report) -> Iterator[str]:
    width = max((len(row["kind"]) for row in report["results"]), default=0)
    for row in report["results"]:
        text = f"{row['kind']:{width}}  {row['threads']} thread(s) {row['steps_per_s']:8.1f} steps/s"
        yield text + f" [{row['lowest']:.1f}, {row['highest']:.1f}]"
