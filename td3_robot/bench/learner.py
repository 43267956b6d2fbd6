"""``td3-robot bench learner``: TD3 updates per second of the learner on this machine.

The batches come from a full replay buffer. Its transitions are random and have the sizes of Walker2D. The time
includes sampling. Each kind of update has its own process. On the CPU, each critic has a separate thread if the
benchmark runs with two threads or more. In the kinds ``operators fp32`` and ``operators bf16``, all threads share every
matrix product instead.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from td3_robot.bench import harness
from td3_robot.bench.example import ACTIONS, BATCH, OBSERVATIONS, transitions
from td3_robot.bench.harness import Report
from td3_robot.config.learner import LearnerConfig
from td3_robot.errors import NodeError
from td3_robot.learner import compute
from td3_robot.learner.engine import selection
from td3_robot.learner.engine.threads import use_threads
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.util.machine import compiler_lack

NETWORKS = {"400-300": (400, 300), "256-256": (256, 256)}
STORED = 200_000  # transitions in each replay buffer
_WARM_UP = 20  # updates
_BLOCK = 20  # updates between two readings of the clock
_LEARNING = {
    "fp32": {"precision": "fp32", "threads_in": "critics"},
    "bf16": {"precision": "bf16", "threads_in": "critics"},
    "operators fp32": {"precision": "fp32", "threads_in": "operators"},
    "operators bf16": {"precision": "bf16", "threads_in": "operators"},
    "compiled fp32": {"precision": "fp32", "threads_in": "critics", "compile": True},
    "compiled bf16": {"precision": "bf16", "threads_in": "critics", "compile": True},
}
"""Maps each kind of update to values of the learner's configuration."""

Run = Callable[[int], None]
"""Takes a number, makes this many updates, and returns when the last update is done."""
Contestants = dict[str, Callable[[], Run]]
"""Maps each contestant's name to a function that prepares its updates, in the contestant's process."""


class Turn(NamedTuple):
    """The result of a contestant in one turn."""

    updates_per_s: float
    cpu_ms: float  # processor time of one update, summed over all threads


def main(arguments: Sequence[str]) -> int:
    parser = options(
        "td3-robot bench learner", "Measure TD3 updates per second of the learner. Run nothing else meanwhile."
    )
    return harness.show(measure(given := parser.parse_args(arguments)), given.json, lines)


def options(command: str, description: str) -> harness.Options:
    parser = harness.Options(command, description, ("", "--json", "--networks 400-300 --threads 2 --repetitions 9"))
    parser.number("--seconds", 1.5, "S", "length of one measurement", low=0.01)
    parser.number("--repetitions", 5, "N", "measurements of each variant")
    parser.number("--threads", [1, 2], "N", "measure with each of these numbers of threads")
    parser.number("--batch", BATCH, "N", "batch size")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--layer-norm", action="store_true", help="critics with LayerNorm")
    parser.add_argument("--no-compile", action="store_true", help="leave out compiled updates: compiling takes time")
    return parser


def measure(
    options: argparse.Namespace, others: Callable[[Sequence[int], int, int, str], Contestants] = lambda *_: {}
) -> Report:
    """Measure every kind of update with each network and number of threads.

    ``others`` takes the widths of the networks, the batch size, the number of threads and the device. It returns more
    contestants.
    """
    device = compute.device(options.device)
    report: Report = {
        "benchmark": "learner",
        "machine": harness.describe("td3-robot", "torch", "numpy"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "batch": options.batch,
        "observations": OBSERVATIONS,
        "actions": ACTIONS,
        "layer_norm": options.layer_norm,
        "seconds": options.seconds,
        "repetitions": options.repetitions,
        "not_measured": {},
        "results": [],
    }
    for network, threads in itertools.product(options.networks, options.threads):
        hidden = NETWORKS[network]
        contestants = others(hidden, options.batch, threads, device.type)
        for kind in _kinds(device, threads, compiled=not options.no_compile):
            contestants[kind] = partial(
                ours, kind, hidden, threads, device.type, batch=options.batch, layer_norm=options.layer_norm
            )
        missing = {kind: reason for kind in contestants if (reason := lack(kind, device))}
        report["not_measured"] |= missing
        able = {kind: make for kind, make in contestants.items() if kind not in missing}
        turns = take_turns(able, options.seconds, options.repetitions)
        report["results"] += [
            {
                "network": network,
                "threads": threads,
                "kind": kind,
                **harness.summary("updates_per_s", [turn.updates_per_s for turn in made]),
                "cpu_ms_per_update": statistics.median(turn.cpu_ms for turn in made),
            }
            for kind, made in turns.items()
        ]
    return report


def lack(kind: str, device: torch.device = compute.CPU) -> str | None:
    """Return why the benchmark leaves out a kind of update on this machine; None if it measures this kind."""
    if "compiled" in kind and (missing := compiler_lack()):
        return missing
    problem = compute.bf16_problem(device) if "bf16" in kind else None
    return f"this {problem}" if problem else None


def _kinds(device: torch.device, threads: int, *, compiled: bool) -> list[str]:
    """Return the kinds of update to measure, without kinds that do the same as another kind on this device."""
    kinds = ["fp32", "bf16"]
    if device.type == "cpu":
        kinds += ["operators fp32", "operators bf16"] * (threads > 1) + ["compiled fp32", "compiled bf16"] * compiled
    return kinds


def ours(kind: str, hidden: Sequence[int], threads: int, device_name: str, *, batch: int, layer_norm: bool) -> Run:
    """Prepare the learner's updates with this number of threads.

    Raises:
        NodeError: the update was not compiled.
    """
    device = torch.device(device_name)
    config = LearnerConfig(
        threads=threads,
        device=device_name,  # type: ignore[arg-type]
        batch_size=batch,
        layer_norm=layer_norm,
        learning_rate=1e-3,
        **_LEARNING[kind],
    )
    use_threads(threads, config.threads_in)
    algorithm = selection.implementation(config)(OBSERVATIONS, ACTIONS, hidden, config, seed=0, device=device)
    buffer = ReplayBuffer(STORED, OBSERVATIONS, ACTIONS, seed=0)
    algorithm.prepare()
    if config.compile and not algorithm.compiled:
        raise NodeError("the update was not compiled; to leave out compiled updates, add --no-compile")
    if device.type == "cuda":
        buffer.use_device(device)
    buffer.add(*transitions(STORED), np.ones(STORED, np.float32))

    def run(updates: int) -> None:
        for _ in range(updates):
            algorithm.learn(buffer.sample(batch))
        algorithm.metrics()  # waits for the device

    return run


def take_turns(contestants: Contestants, seconds: float, repetitions: int) -> dict[str, list[Turn]]:
    """Let contestants take turns of this many seconds, each in its own process."""
    with contextlib.ExitStack() as stack:
        turns: dict[str, Callable[[], Turn]] = {}
        for kind, make in contestants.items():
            call = stack.enter_context(harness.process_of(kind))
            call(prepare, make)
            turns[kind] = partial(call, turn, seconds)
        return harness.take_turns(turns, repetitions)


_prepared: list[Run] = []
"""The updates of the contestant that this process runs."""


def prepare(make: Callable[[], Run]) -> None:
    """Prepare the contestant of this process."""
    _prepared.append(make())
    _prepared[0](_WARM_UP)


def turn(seconds: float) -> Turn:
    """Measure the contestant of this process for at least this many seconds."""
    (run,) = _prepared
    run(2)  # warms up caches and clock frequency
    busy = time.process_time()
    updates, passed = harness.repeat_for(seconds, run, _BLOCK)
    return Turn(updates / passed, 1e3 * (time.process_time() - busy) / updates)


def lines(report: Report) -> Iterator[str]:
    for row in report["results"]:
        text = f"{row['network']}  batch {report['batch']}  {row['threads']} thread(s)  "
        text += f"{row['kind']:15}{row['updates_per_s']:8.1f} updates/s"
        text += f" [{row['lowest']:.1f}, {row['highest']:.1f}]"
        yield f"{text} {row['cpu_ms_per_update']:6.2f} ms of processor time"
