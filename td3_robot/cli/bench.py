"""``td3-robot bench``: runs one benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from td3_robot.cli.verbs import Verb, listing, run_row

BENCHMARKS: dict[str, Verb] = {
    "policy": Verb("td3_robot.bench.policy:main", "policy server: time for an action, time to start, and memory"),
    "link": Verb("td3_robot.bench.link:main", "time from observation to action over a link; missed deadlines"),
    "sim": Verb("td3_robot_sims.bench_sim:main", "simulator steps per second; memory of a robot"),
    "learner": Verb("td3_robot.bench.learner:main", "TD3 updates per second of the learner"),
    "train": Verb("td3_robot.bench.train:main", "environment steps per second of a training"),
    "record": Verb("td3_robot.bench.recording:record", "cost of recording for a node; speed of a recorder"),
    "replay": Verb(
        "td3_robot.bench.recording:replay_policy", "speed of a replay of the policy core, as a multiple of real time"
    ),
    "conformance": Verb("td3_robot.bench.conformance:main", "does a driver or a policy server follow the protocol?"),
}
"""For each benchmark: its name, the function that runs it, and its purpose."""


def main(arguments: Sequence[str]) -> int:
    usage = (
        "usage: td3-robot bench BENCHMARK [--json] [ARGUMENTS]\n\n"
        f"benchmarks:\n{listing(BENCHMARKS)}\n\n"
        "examples:\n"
        "  td3-robot bench policy\n"
        "  td3-robot bench link --seconds 10\n"
        "  td3-robot bench learner --threads 1 2\n"
        "  td3-robot bench sim --json > sim.json\n\n"
        "td3-robot bench BENCHMARK --help lists its arguments."
    )
    return run_row(BENCHMARKS, "benchmark", usage, arguments)
