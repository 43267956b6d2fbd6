"""``td3-robot bench``: finds a benchmark by module name and runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from td3_robot.errors import UsageError

BENCHMARKS: dict[str, tuple[str, str]] = {
    "policy": ("td3_robot.bench.policy:main", "policy server: time for an action, start and memory"),
    "link": ("td3_robot.bench.link:main", "observation to action over a link, beside an echo; a 1 kHz loop; attacks"),
    "sim": ("td3_robot_sims.bench_sim:main", "simulator steps per second beside published robots; memory of a robot"),
    "learner": (
        "td3_robot.bench.learner:main",
        "TD3 updates per second beside Stable-Baselines3; profile",
    ),
    "train": ("td3_robot_sims.bench_train:main", "training steps per second beside Stable-Baselines3"),
    "record": ("td3_robot.bench.recording:record", "cost of being recorded; speed of a recorder"),
    "replay": ("td3_robot.bench.recording:replay_policy", "speed of a replay of the policy core, in times real time"),
}
"""Benchmark: its function by module name (td3_robot never imports simulators), and what it measures."""


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
    """Return what ``td3-robot bench --help`` prints."""
    rows = "\n".join(f"  {name:<8} {purpose}" for name, (_, purpose) in BENCHMARKS.items())
    return (
        "usage: td3-robot bench BENCHMARK [--json] [ARGUMENTS]\n\n"
        f"benchmarks:\n{rows}\n\n"
        "examples:\n"
        "  td3-robot bench policy\n"
        "  td3-robot bench link --seconds 10\n"
        "  td3-robot bench learner --profile\n"
        "  td3-robot bench sim --json > sim.json\n\n"
        "td3-robot bench BENCHMARK --help lists its arguments."
    )
