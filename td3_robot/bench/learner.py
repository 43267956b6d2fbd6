"""``td3-robot bench learner``: how many TD3 updates a second the learner makes, beside Stable-Baselines3.

Batches of 256 from a full buffer of random transitions of Walker2D's sizes; sampling included. Every contestant has a
process of its own; they take turns, so that a change of the machine's load meets all of them. A figure is the median
over the turns, a ratio the median of the ratios within one turn. Two of the contestants are only the matrix products
of an update, one after the other in each thread: what an update's speed cannot exceed on this machine. With several
threads ours takes part twice: with the two critics side by side, and as ``operators`` with all threads inside those.
As ``compiled`` it has all its threads inside operators, too.
"""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from td3_robot.bench.learner_contestants import ACTIONS, BATCH, OBSERVATIONS, LacksError, contestant, products
from td3_robot.bench.profile import profile
from td3_robot.errors import NodeError, Td3RobotError, UsageError
from td3_robot.learner import compute
from td3_robot.runtime.node import Parser
from td3_robot.util import machine

NETWORKS = {"400-300": (400, 300), "256-256": (256, 256)}
PRECISIONS = ("fp32", "bf16")
_WARM_UP = 20  # updates
_BLOCK = 20  # updates between two looks at the clock
_PROFILED = 200  # updates

_EXAMPLES = """examples:
  td3-robot bench learner
  td3-robot bench learner --json > learner.json
  td3-robot bench learner --networks 400-300 --threads 2 --repetitions 9
  td3-robot bench learner --profile
"""


class Turn(NamedTuple):
    """What a contestant reached in one turn."""

    updates_per_s: float
    cpu_ms: float  # of all its threads, per update: less than the time it took where others held the cores


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot bench learner",
        description="Measure TD3 updates a second of our learner, of Stable-Baselines3's, and of the matrix products "
        "alone. Use cores that nobody else does: with as many threads as cores, one busy neighbour slows all.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--seconds", type=float, default=1.5, metavar="S", help="of one turn (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all (default: %(default)s)")
    parser.add_argument("--layer-norm", action="store_true", help="ours with LayerNorm critics")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave compiled updates out: compiling takes its time"
    )
    parser.add_argument("--profile", action="store_true", help="our time by kind of operation, instead of speeds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for name, low in (("seconds", 0.01), ("repetitions", 1), ("threads", 1)):
        given = getattr(options, name)
        if not (lowest := min(given) if isinstance(given, list) else given) >= low:  # NaN as well
            raise UsageError(f"--{name} is {lowest}; it must be at least {low}")
    if options.profile and options.device != "cpu":
        raise UsageError(f"--profile is of the processor's time; --device is {options.device!r} and must be 'cpu'")
    device = compute.device(options.device)
    kinds, missing = _kinds(device)
    report: dict[str, Any] = {
        "benchmark": "learner",
        "machine": machine.describe(
            ("td3-robot", "torch", "numpy", *(["stable-baselines3"] if "sb3" in kinds else []))
        ),
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
            for network in options.networks
            for kind in PRECISIONS
            if kind in kinds
        ]
    else:
        report |= {"seconds": options.seconds, "repetitions": options.repetitions, "results": []}
        for network, threads in itertools.product(options.networks, options.threads):
            variant = common | {"hidden": NETWORKS[network], "threads": threads}
            several = threads > 1 and device.type == "cpu"  # or it makes no difference where they are
            taking_part = kinds + [f"operators {kind}" for kind in kinds if several and kind in PRECISIONS]
            taking_part += ["compiled fp32"] * (device.type == "cpu" and not options.no_compile)
            turns = _take_turns(taking_part, variant, options.seconds, options.repetitions, missing)
            report["results"] += _rows(network, threads, turns, report["gflop_per_update"][network])
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 0


def worker(pipe: Connection, kind: str, variant: Mapping[str, Any]) -> None:
    """Says what it lacks to take part, if anything; answers each number of seconds with a Turn of it, until None."""
    try:
        run = contestant(kind, **variant)
    except LacksError as lack:
        pipe.send(str(lack))
        return
    run(_WARM_UP)
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        run(2)  # caches and clock frequency back
        updates, elapsed, start, busy = 0, 0.0, time.perf_counter(), time.process_time()
        while not updates or elapsed < seconds:  # a block even where all the time has passed before it
            run(_BLOCK)
            updates += _BLOCK
            elapsed = time.perf_counter() - start
        pipe.send(Turn(updates / elapsed, 1e3 * (time.process_time() - busy) / updates))


def _take_turns(
    kinds: Sequence[str], variant: Mapping[str, Any], seconds: float, repetitions: int, missing: dict[str, str]
) -> dict[str, list[Turn]]:
    """The turns of each contestant; a list's n-th entries belong to one round, in which all had a go.

    Whoever cannot take part goes to ``missing``, with the reason.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for kind in kinds:
        pipes[kind], theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, kind, variant), daemon=True)
        process.start()
        theirs.close()  # so that a worker's death ends the wait for it
        processes.append(process)
        if lack := _receive(pipes[kind], kind):
            missing[kind] = lack
            del pipes[kind]
    turns: dict[str, list[Turn]] = {kind: [] for kind in pipes}
    names = list(pipes)
    for number in range(repetitions):
        for kind in names[number % len(names) :] + names[: number % len(names)]:
            pipes[kind].send(seconds)
            turns[kind].append(_receive(pipes[kind], kind))
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return turns


def _receive(pipe: Connection, kind: str) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise NodeError(f"the process of {kind!r} died; what it printed says why") from None


def _rows(network: str, threads: int, turns: Mapping[str, Sequence[Turn]], gflop: float) -> list[dict[str, Any]]:
    speeds = {kind: [turn.updates_per_s for turn in made] for kind, made in turns.items()}
    return [
        {
            "network": network,
            "threads": threads,
            "kind": kind,
            "updates_per_s": statistics.median(values),
            "lowest": min(values),
            "highest": max(values),
            "cpu_ms_per_update": statistics.median(turn.cpu_ms for turn in turns[kind]),
            "gflops": statistics.median(values) * gflop,
            "over_sb3": ratio(values, speeds.get("sb3")),
            "share_of_peak": None if kind == _peak(kind) else ratio(values, speeds.get(_peak(kind))),
        }
        for kind, values in speeds.items()
    ]


def _peak(kind: str) -> str:
    """The contestant that is a contestant's matrix products alone."""
    return f"products {kind.rpartition(' ')[2]}"


def ratio(ours: Sequence[float], theirs: Sequence[float] | None) -> float | None:
    """The median of the ratios within one turn; None where the other was not measured."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if theirs else None


def _kinds(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Who takes part, and who cannot and why."""
    missing = {}
    try:
        importlib.import_module("stable_baselines3")
    except ModuleNotFoundError:
        missing["sb3"] = "Stable-Baselines3 is not installed; pip install 'stable-baselines3>=2.6'"
    if problem := compute.bf16_problem(device):
        missing["bf16"] = missing["products bf16"] = f"this {problem}"
    kinds = ["sb3", *PRECISIONS, *(f"products {kind}" for kind in PRECISIONS)]
    return [kind for kind in kinds if kind not in missing], missing


def _gflop(hidden: Sequence[int]) -> float:
    """Floating-point operations of the matrix products of one update, the mean over the delayed ones, in 1e9."""
    critic, actor = products(hidden)
    return sum(2 * rows * inner * columns for rows, inner, columns in critic + critic + actor) / 2e9


def _text(report: Mapping[str, Any]) -> str:
    computer = report["machine"]
    lines = [f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before"]
    lines += [f"not measured: {kind}: {reason}" for kind, reason in report["not_measured"].items()]
    for row in report.get("results", []):
        text = f"{row['network']}  {row['threads']} thread(s)  {row['kind']:15}{row['updates_per_s']:8.1f} updates/s"
        text += f" [{row['lowest']:.1f}, {row['highest']:.1f}] {row['cpu_ms_per_update']:6.2f} ms of processor time"
        text += "" if row["over_sb3"] is None else f"  {row['over_sb3']:5.2f} × sb3"
        lines.append(text + ("" if row["share_of_peak"] is None else f"  {row['share_of_peak']:4.0%} of peak"))
    for row in report.get("profile", []):
        lines.append(f"{row['network']}  {row['kind']}  1 thread  {row['update_us']:.0f} µs an update")
        lines += [f"  {kind:12}{us:8.0f} µs  {us / row['update_us']:4.0%}" for kind, us in row["by_kind_us"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Td3RobotError as error:
        print(f"td3-robot bench learner: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
