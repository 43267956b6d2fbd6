"""``td3-robot bench learner``: TD3 updates per second of our learner, beside Stable-Baselines3.

Batches of 256 come from a full replay buffer of random transitions of Walker2D's sizes; the time includes sampling.
Every contestant has a process to itself. Two contestants make only the matrix products of an update, one after the
other in each thread: no update can be faster on this machine. With several threads ours takes part twice: with the two
critics side by side, and as ``operators`` with all threads inside operators. ``compiled`` has them inside operators,
too.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from td3_robot.bench import harness
from td3_robot.bench.example import ACTIONS, BATCH, OBSERVATIONS
from td3_robot.bench.harness import Report, ratio
from td3_robot.bench.learner_contestants import LacksError, contestant, products
from td3_robot.bench.profile import profile
from td3_robot.errors import UsageError
from td3_robot.learner import compute

NETWORKS = {"400-300": (400, 300), "256-256": (256, 256)}
PRECISIONS = ("fp32", "bf16")
_WARM_UP = 20  # updates
_BLOCK = 20  # updates between two looks at the clock
_PROFILED = 200  # updates


class Turn(NamedTuple):
    """What a contestant reached in one turn."""

    updates_per_s: float
    cpu_ms: float  # processor time of all its threads, for each update


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.Options(
        "td3-robot bench learner",
        "Measure TD3 updates per second of our learner, of Stable-Baselines3's, and of the matrix products alone. Use "
        "idle cores: with as many threads as cores, one busy neighbour slows all.",
        ("", "--json > learner.json", "--networks 400-300 --threads 2 --repetitions 9", "--profile"),
    )
    parser.number("--seconds", 1.5, "S", "length of one turn", low=0.01)
    parser.number("--repetitions", 5, "N", "turns of each contestant")
    parser.number("--threads", [1, 2], "N", "numbers of threads")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for all (default: %(default)s)")
    parser.add_argument("--layer-norm", action="store_true", help="ours with LayerNorm critics")
    parser.add_argument("--no-compile", action="store_true", help="leave out compiled updates: compiling takes time")
    parser.add_argument("--profile", action="store_true", help="our time by kind of operation, instead of speeds")
    options = parser.parse(arguments)
    if options.profile and options.device != "cpu":
        raise UsageError(f"--profile measures processor time; --device is {options.device!r} and must be 'cpu'")
    device = compute.device(options.device)
    kinds, missing = _contestants(device)
    report: Report = {
        "benchmark": "learner",
        "machine": harness.describe("td3-robot", "torch", "numpy", *(["stable-baselines3"] if "sb3" in kinds else [])),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "batch": BATCH,
        "observations": OBSERVATIONS,
        "actions": ACTIONS,
        "layer_norm": options.layer_norm,
        "gflop_per_update": {name: _gflop(NETWORKS[name]) for name in options.networks},
        "not_measured": missing,
    }
    common = {"device": device.type, "layer_norm": options.layer_norm}
    if options.profile:
        report["profile"] = [
            {"network": network, "kind": kind, "threads": 1}
            | profile(contestant(kind, hidden=NETWORKS[network], threads=1, **common), _PROFILED)
            for network, kind in itertools.product(options.networks, PRECISIONS)
            if kind in kinds
        ]
        return harness.show(report, options.json, _profile_lines)
    report |= {"seconds": options.seconds, "repetitions": options.repetitions, "results": []}
    for network, threads in itertools.product(options.networks, options.threads):
        taking_part = [*kinds]
        if threads > 1 and device.type == "cpu":  # with one thread, or on a GPU, it is the same contestant
            taking_part += [f"operators {kind}" for kind in kinds if kind in PRECISIONS]
        if device.type == "cpu" and not options.no_compile:
            taking_part.append("compiled fp32")
        variant = common | {"hidden": NETWORKS[network], "threads": threads}
        turns = measure(taking_part, variant, options.seconds, options.repetitions, missing)
        report["results"] += _rows(network, threads, turns, report["gflop_per_update"][network])
    return harness.show(report, options.json, _lines)


def measure(
    kinds: Sequence[str], variant: Mapping[str, Any], seconds: float, repetitions: int, missing: dict[str, str]
) -> dict[str, list[Turn]]:
    """Let contestants take turns; the n-th results belong to the same round.

    Args:
        kinds: names of contestants.
        variant: arguments of :func:`contestant` beside the kind.
        seconds: length of a turn.
        repetitions: turns of each.
        missing: gets the reason for each contestant that cannot run here.
    """
    with contextlib.ExitStack() as stack:
        workers: dict[str, harness.Worker] = {}
        for kind in kinds:
            worker = stack.enter_context(harness.Worker(kind, serve, kind, variant))
            if lack := worker.receive():
                missing[kind] = lack
            else:
                workers[kind] = worker

        def turn(worker: harness.Worker) -> Turn:
            worker.send(seconds)
            made: Turn = worker.receive()
            return made

        turns = {kind: lambda worker=worker: turn(worker) for kind, worker in workers.items()}
        return harness.take_turns(turns, repetitions)


def serve(pipe: Connection, kind: str, variant: Mapping[str, Any]) -> None:
    """Run a contestant: send what it lacks or None, then answer each number of seconds with a Turn."""
    try:
        run = contestant(kind, **variant)
    except LacksError as lack:
        pipe.send(str(lack))
        return
    run(_WARM_UP)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            seconds = pipe.recv()
            run(2)  # brings back caches and clock frequency
            busy = time.process_time()
            updates, passed = harness.repeat_for(seconds, run, _BLOCK)
            pipe.send(Turn(updates / passed, 1e3 * (time.process_time() - busy) / updates))


def _rows(network: str, threads: int, turns: Mapping[str, Sequence[Turn]], gflop: float) -> list[dict[str, Any]]:
    speeds = {kind: [turn.updates_per_s for turn in made] for kind, made in turns.items()}
    rows = []
    for kind, values in speeds.items():
        alone = f"products {kind.rpartition(' ')[2]}"
        rows.append(
            {
                "network": network,
                "threads": threads,
                "kind": kind,
                **harness.summary("updates_per_s", values),
                "cpu_ms_per_update": statistics.median(turn.cpu_ms for turn in turns[kind]),
                "gflops": statistics.median(values) * gflop,
                "over_sb3": ratio(values, speeds["sb3"]) if "sb3" in speeds else None,
                "share_of_peak": ratio(values, speeds[alone]) if alone in speeds and kind != alone else None,
            }
        )
    return rows


def _contestants(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Return the contestants that can run here, and the reason for each that cannot."""
    missing = {}
    if lack := harness.not_installed("stable_baselines3"):
        missing["sb3"] = lack
    if problem := compute.bf16_problem(device):
        missing["bf16"] = missing["products bf16"] = f"this {problem}"
    kinds = ["sb3", *PRECISIONS, *(f"products {kind}" for kind in PRECISIONS)]
    return [kind for kind in kinds if kind not in missing], missing


def _gflop(hidden: Sequence[int]) -> float:
    """Return 1e9 floating-point operations of one update's matrix products; every second update has an actor update."""
    critic, actor = products(hidden)
    return sum(2 * rows * inner * columns for rows, inner, columns in critic + critic + actor) / 2e9


def _lines(report: Report) -> Iterator[str]:
    for row in report["results"]:
        text = f"{row['network']}  {row['threads']} thread(s)  {row['kind']:15}{row['updates_per_s']:8.1f} updates/s"
        text += f" [{row['lowest']:.1f}, {row['highest']:.1f}] {row['cpu_ms_per_update']:6.2f} ms of processor time"
        text += "" if row["over_sb3"] is None else f"  {row['over_sb3']:5.2f} × sb3"
        yield text + ("" if row["share_of_peak"] is None else f"  {row['share_of_peak']:4.0%} of peak")


def _profile_lines(report: Report) -> Iterator[str]:
    for row in report["profile"]:
        yield f"{row['network']}  {row['kind']}  1 thread  {row['update_us']:.0f} µs an update"
        for kind, us in row["by_kind_us"].items():
            yield f"  {kind:12}{us:8.0f} µs  {us / row['update_us']:4.0%}"
