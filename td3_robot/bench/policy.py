"""``td3-robot bench policy``: what an action costs the policy server, how soon it serves, and what memory it takes."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.bench import example
from td3_robot.bench.peers import Robot, serving
from td3_robot.errors import NodeError, UsageError
from td3_robot.messages import Step
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.noise import Gaussian
from td3_robot.runtime.node import Parser
from td3_robot.safety.limits import SafetyConfig
from td3_robot.transport import codec
from td3_robot.transport import link as handshake
from td3_robot.transport.link import ServerLink
from td3_robot.util import machine

ROBOTS = (1, 8, 64)
_EXAMPLES = """examples:
  td3-robot bench policy
  td3-robot bench policy --json --memory 1000000 > policy.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot bench policy",
        description="Measure the policy server: time for an action, time to the first one, memory.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--actions", type=int, default=20_000, metavar="N", help="to time (default: %(default)s)")
    parser.add_argument(
        "--memory",
        type=int,
        default=100_000,
        metavar="N",
        help="actions over which memory is watched (default: %(default)s)",
    )
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="servers to start (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for name in ("actions", "memory", "starts"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    report: dict[str, Any] = {
        "machine": machine.describe(("td3-robot", "numpy", "pyzmq")),
        "hidden": list(example.HIDDEN),
        "server_us": {str(robots): server_time(robots, options.actions) for robots in ROBOTS},
        "deployed_us": server_time(1, options.actions, example.SAFETY),
        "memory": memory(options.memory),
        "start": start(options.starts),
    }
    print(json.dumps(report) if options.json else _text(report))
    return 0


class _Served:
    """A policy core with one robot process that it has met, fed with bytes and asked for bytes: no sockets."""

    def __init__(self, robots: int, safety: SafetyConfig | None = None) -> None:
        bundle = example.bundle()
        self.core = PolicyCore(0, exploring=safety is None, safety=safety)
        self.core.load(1, bundle)
        self.session = ServerLink("policy", "bench", {"driver": (Step,)}, {}, 1, bundle.spec)
        hello = handshake.hello("driver", example.SOURCE, client=1, robots=robots, spec=bundle.spec)
        self.session.receive(b"key", [b"hello", codec.encode(hello)], 0.0)
        rng = np.random.default_rng(0)
        self.payloads = [codec.encode(example.step(sequence, robots, rng)) for sequence in range(1000)]

    def answer(self, number: int) -> None:
        inputs, _ = self.session.receive(b"key", [b"step", self.payloads[number % len(self.payloads)]], 0.0)
        for _, action in self.core.step(inputs, 0.0):
            codec.encode(action)


def server_time(robots: int, actions: int, safety: SafetyConfig | None = None) -> dict[str, dict[str, float]]:
    """From the bytes of a Step to the bytes of its Action, and the parts of that; with safety settings, no noise.

    ``core`` is all between decoding and encoding: the actor, the noise, whatever filters actions, and book-keeping.
    """
    served = _Served(robots, safety)
    for number in range(len(served.payloads)):  # what is done once is done before
        served.answer(number)
    clock = time.perf_counter_ns
    times: dict[str, list[int]] = {name: [] for name in ("decode", "core", "encode", "all")}
    for number in range(actions):
        payload = served.payloads[number % len(served.payloads)]
        begin = clock()
        inputs, _ = served.session.receive(b"key", [b"step", payload], 0.0)
        decoded = clock()
        ((_, action),) = served.core.step(inputs, 0.0)
        computed = clock()
        codec.encode(action)
        end = clock()
        for name, span in zip(times, (decoded - begin, computed - decoded, end - computed, end - begin), strict=True):
            times[name].append(span)
    if served.core.counters["safe_actions"]:
        raise NodeError("the benchmark's policy server did not let its policy act")
    return {name: example.spread(spans) for name, spans in (times | _inside(robots, actions, served)).items()}


def _inside(robots: int, actions: int, served: _Served) -> dict[str, list[int]]:
    """The actor and the noise by themselves."""
    actor = Actor(example.bundle())
    noise = Gaussian(0, example.SOURCE, 0, robots, example.ACTIONS)
    rng = np.random.default_rng(1)
    steps = [example.step(sequence, robots, rng) for sequence in range(len(served.payloads))]
    clock = time.perf_counter_ns
    times: dict[str, list[int]] = {"infer": [], "noise": []}
    for number in range(actions):
        step = steps[number % len(steps)]
        begin = clock()
        actor(step.observation)
        inferred = clock()
        noise(step.episode, step.episode_step)
        end = clock()
        times["infer"].append(inferred - begin)
        times["noise"].append(end - inferred)
    return times


def memory(actions: int) -> dict[str, int | None]:
    """Resident memory before and after so many actions; the first ones, which fill caches, come before."""
    served = _Served(1)
    for number in range(max(1000, actions // 10)):
        served.answer(number)
    before = machine.resident_bytes()
    for number in range(actions):
        served.answer(number)
    after = machine.resident_bytes()
    growth = None if before is None or after is None else after - before
    return {"actions": actions, "growth_bytes": growth}


def start(times: int) -> dict[str, Any]:
    """Seconds from starting a process to its first action; the processor time it took and the memory it has then."""
    seconds, processor, resident = [], [], []
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder:
        bundle = Path(folder) / "policy.safetensors"
        example.bundle().save(bundle)
        for number in range(times):
            begin = time.perf_counter()
            with serving("policy", f"ipc://{folder}/{number}", "--bundle", str(bundle)) as (process, endpoint):
                # Not before: ZeroMQ would try again in growing intervals, and those would be measured.
                with contextlib.closing(Robot(endpoint, 1)) as robot:
                    robot.round_trip()
                    seconds.append(time.perf_counter() - begin)
                if (spent := machine.processor_seconds(process)) is not None:
                    processor.append(spent)
                if (size := machine.resident_bytes(process)) is not None:
                    resident.append(size)
    return {
        "to_first_action_s": [round(value, 3) for value in seconds],
        "processor_s": processor,
        "resident_bytes": max(resident, default=None),
    }


def _text(report: dict[str, Any]) -> str:
    computer = report["machine"]
    lines = [f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before", example.HEAD]
    for robots, rows in report["server_us"].items():
        lines += [example.row(f"{robots:>2} robots, {name}", figures) for name, figures in rows.items()]
    lines += [example.row(f" 1 deployed, {name}", report["deployed_us"][name]) for name in ("core", "all")]
    kept = report["memory"]
    if kept["growth_bytes"] is not None:
        lines.append(f"memory over {kept['actions']:,} actions: {kept['growth_bytes'] / 1e6:+.2f} MB")
    begun = report["start"]
    size = "" if begun["resident_bytes"] is None else f"; {begun['resident_bytes'] / 1e6:.1f} MB resident"
    lines.append(f"start to first action: {min(begun['to_first_action_s']):.3f} s{size}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
