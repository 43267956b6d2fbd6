"""``td3-robot bench policy``: the policy server's time for an action, its time to start, and its memory."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.bench import example, harness
from td3_robot.bench.harness import Report, percentile_row, percentiles
from td3_robot.bench.peers import Robot, serving
from td3_robot.errors import NodeError
from td3_robot.messages import Step
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.noise import Gaussian
from td3_robot.policy.noise_v2 import GaussianV2
from td3_robot.safety.limits import SafetyConfig
from td3_robot.transport import codec
from td3_robot.transport import link as handshake
from td3_robot.transport.link import ServerLink
from td3_robot.util import machine

ROBOTS = (1, 8, 64)


def main(arguments: Sequence[str]) -> int:
    parser = harness.Options(
        "td3-robot bench policy",
        "Measure the policy server: time for an action, time to the first action, memory.",
        ("", "--json --memory 1000000 > policy.json"),
    )
    parser.number("--actions", 20_000, "N", "actions for the measurement of time")
    parser.number("--memory", 100_000, "N", "actions for the measurement of memory")
    parser.number("--starts", 3, "N", "servers to start")
    options = parser.parse_args(arguments)
    report = {
        "machine": harness.describe("td3-robot", "numpy", "pyzmq"),
        "hidden": list(example.HIDDEN),
        "server_us": {str(robots): server_time(robots, options.actions) for robots in ROBOTS},
        "deployed_us": server_time(1, options.actions, example.SAFETY),
        "memory": memory(options.memory),
        "start": start(options.starts),
    }
    return harness.show(report, options.json, _lines)


class _Server:
    """A policy core with one connected source. It decodes Steps and encodes Actions, without sockets."""

    def __init__(self, robots: int, safety: SafetyConfig | None = None) -> None:
        bundle = example.bundle()
        self.core = PolicyCore(0, exploring=safety is None, safety=safety)
        self.core.load(1, bundle)
        self.link = ServerLink("policy", "server", {"driver": (Step,)}, {}, 1, bundle.spec)
        hello = handshake.hello("driver", example.SOURCE, client=1, robots=robots, spec=bundle.spec)
        self._hello = [b"hello", codec.encode(hello)]
        rng = np.random.default_rng(0)
        self.payloads = [codec.encode(example.step(sequence, robots, rng)) for sequence in range(1000)]

    def answer(self, number: int) -> list[int]:
        """Answer a Step. Return the times (ns) before decoding, after decoding, after the core and after encoding."""
        clock = time.perf_counter_ns
        index = number % len(self.payloads)
        if index == 0:  # the source connects again, so that its sequence may begin again at 0
            self.core.step(self.link.receive(b"key", self._hello, 0.0)[0], 0.0)
        payload = self.payloads[index]
        begin = clock()
        inputs, _ = self.link.receive(b"key", [b"step", payload], 0.0)
        decoded = clock()
        outputs = self.core.step(inputs, 0.0)
        computed = clock()
        for _, action in outputs:
            codec.encode(action)
        return [begin, decoded, computed, clock()]


def server_time(robots: int, actions: int, safety: SafetyConfig | None = None) -> dict[str, dict[str, float]]:
    """Measure the time from the bytes of a Step to the bytes of its Action. Return percentiles (µs) of each part.

    With safety settings, the exploration noise is off.
    """
    server = _Server(robots, safety)
    for number in range(len(server.payloads)):  # fills caches
        server.answer(number)
    stamps = np.array([server.answer(number) for number in range(actions)])
    if server.core.counters["safe_actions"] or server.core.counters["actions"] < actions:
        raise NodeError("the benchmark's policy server did not answer every Step with an action of the policy")
    spans = dict(zip(("decode", "core", "encode"), np.diff(stamps).T, strict=True))
    spans["all"] = stamps[:, -1] - stamps[:, 0]
    return {name: percentiles(values) for name, values in (spans | _actor_and_noise(robots, actions)).items()}


def _actor_and_noise(robots: int, actions: int) -> dict[str, Any]:
    """Measure the actor, the noise, and the noise of earlier td3-robot versions separately. Return the times (ns).

    The noise draws its numbers for several steps at once, so only one of these steps is slow. The highest percentiles
    show the time of such a draw.
    """
    actor = Actor(example.bundle())
    noises = [kind(0, example.SOURCE, 0, robots, example.ACTIONS) for kind in (GaussianV2, Gaussian)]
    rng = np.random.default_rng(1)
    steps = [example.step(sequence, robots, rng) for sequence in range(1000)]
    clock = time.perf_counter_ns
    stamps = []
    for number in range(actions):
        step = steps[number % len(steps)]
        begin = clock()
        actor(step.observation)
        times = [begin, clock()]
        for noise in noises:
            noise(step.episode, step.episode_step)
            times.append(clock())
        stamps.append(times)
    return dict(zip(("infer", "noise", "noise_v1"), np.diff(stamps).T, strict=True))


def memory(actions: int) -> dict[str, int | None]:
    """Measure the growth of resident memory over this many actions after a warm-up.

    ``growth_bytes`` is None on systems other than Linux.
    """
    server, resident = _Server(1), []
    for count in (max(1000, actions // 10), actions):
        for number in range(count):
            server.answer(number)
        resident.append(machine.resident_bytes())
    before, after = resident
    growth = None if before is None or after is None else after - before
    return {"actions": actions, "growth_bytes": growth}


def start(times: int) -> dict[str, Any]:
    """Start server processes one after another.

    For each server, return the seconds until its first action, and the processor time that it has used by then. Also
    return the memory of the largest server.
    """
    seconds, processor, resident = [], [], []
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder:
        bundle = Path(folder) / "policy.safetensors"
        example.bundle().save(bundle)
        for number in range(times):
            begin = time.perf_counter()
            with serving(f"ipc://{folder}/{number}", "--bundle", str(bundle)) as (process, endpoint):
                # Connect after the server is ready; otherwise the time includes ZeroMQ's reconnect interval.
                with contextlib.closing(Robot(endpoint, 1)) as robot:
                    robot.round_trip()
                    seconds.append(round(time.perf_counter() - begin, 3))
                processor.append(machine.processor_seconds(process))
                resident.append(machine.resident_bytes(process))
    return {
        "to_first_action_s": seconds,
        "processor_s": [value for value in processor if value is not None],
        "resident_bytes": max((value for value in resident if value is not None), default=None),
    }


def _lines(report: Report) -> Iterator[str]:
    yield harness.PERCENTILES
    for robots, rows in report["server_us"].items():
        yield from (percentile_row(f"{robots:>2} robots, {name}", figures) for name, figures in rows.items())
    yield from (percentile_row(f" 1 deployed, {name}", report["deployed_us"][name]) for name in ("core", "all"))
    used = report["memory"]
    if used["growth_bytes"] is not None:
        yield f"memory over {used['actions']:,} actions: {used['growth_bytes'] / 1e6:+.2f} MB"
    begun = report["start"]
    size = "" if begun["resident_bytes"] is None else f"; {begun['resident_bytes'] / 1e6:.1f} MB resident"
    yield f"start to first action: {min(begun['to_first_action_s']):.3f} s{size}"
