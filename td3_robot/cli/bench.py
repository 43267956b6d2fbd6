"""``td3-robot bench``: finds the benchmark, by module name, and runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from td3_robot.errors import UsageError

BENCHMARKS: dict[str, tuple[str, str]] = {
    "policy": ("td3_robot.bench.policy:main", "time of the policy server for an action, its start and its memory"),
    "link": (
        "td3_robot.bench.link:main",
        "observation to action and back, beside a bare echo; a loop at 1 kHz; attacks",
    ),
    "sim": ("td3_robot_sims.bench:main", "environment steps a second, beside the published robots; memory of a robot"),
    "learner": ("td3_robot.bench.learner:main", "TD3 updates a second, beside Stable-Baselines3; profile of an update"),
    "train": ("td3_robot_sims.bench_train:main", "environment steps a second of a training, beside Stable-Baselines3"),
    "record": ("td3_robot.bench.recording:record", "what it costs to be recorded; what a recorder writes a second"),
    "replay": ("td3_robot.bench.recording:replay_policy", "how many times real time the policy core is replayed"),
}
"""Benchmark: the function it is (by module name: simulators are never imported), called with the arguments; what of."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not words or words[0] not in BENCHMARKS:
        given = repr(words[0]) if words else "missing"
        raise UsageError(f"the benchmark's name is {given}; it must be one of: {', '.join(BENCHMARKS)}")
    module, _, function = BENCHMARKS[words[0]][0].partition(":")
    code: int = getattr(importlib.import_module(module), function)(words[1:])
    return code


def usage() -> str:
    """What ``td3-robot bench --help`` prints."""
    rows = "\n".join(f"  {name:<8} {purpose}" for name, (_, purpose) in BENCHMARKS.items())
    return (
        "usage: td3-robot bench BENCHMARK [--json] [ARGUMENTS]\n\n"
        f"benchmarks:\n{rows}\n\n"
        "examples:\n"
        "  td3-robot bench policy\n"
        "  td3-robot bench link --seconds 10\n"
        "  td3-robot bench learner --profile\n"
        "  td3-robot bench sim --json > sim.json\n\n"
        "td3-robot bench BENCHMARK --help says more."
    )
