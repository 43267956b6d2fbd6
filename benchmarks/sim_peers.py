"""Compare simulation speed with the published robots of ``pybullet_envs_gymnasium``.

    python benchmarks/sim_peers.py [--steps 1000] [--rounds 5] [--json]

In the report, ``td3_robot_gymnasium`` is our robot from ``gymnasium.make()``. The published robot also comes from
``gymnasium.make()``, so both have the same wrappers.
The script needs ``pip install pybullet_envs_gymnasium==0.6.0``.
"""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
from td3_robot_sims import bench_sim
from td3_robot_sims.bench_sim import ALONE, FLEETS, OURS, SEED, TASKS, Contestants
from td3_robot_sims.quiet import stdout_to_stderr

from td3_robot.bench import harness
from td3_robot.specs import Float32

PUBLISHED = "pybullet_envs_gymnasium"
WRAPPED = "td3_robot_gymnasium"


class Gymnasium:
    """Robots from ``gymnasium.make()``."""

    def __init__(self, name: str, size: int) -> None:
        self._alone = size == ALONE
        self._robots = [gymnasium.make(name, disable_env_checker=True) for _ in range(max(1, size))]
        self._ended = [False] * len(self._robots)
        for number, robot in enumerate(self._robots):
            robot.reset(seed=SEED + number)

    def step(self, action: Float32) -> None:
        """Step every robot, and reset the robots whose episode has ended.

        With the size ``ALONE``, the step that ends an episode also resets the robot. With other sizes, the step after
        the end of an episode only resets the robot, as in our vector environment.
        """
        for number, robot in enumerate(self._robots):
            if self._ended[number]:
                robot.reset()
                self._ended[number] = False
                continue
            _, _, terminated, truncated, _ = robot.step(action[number])
            self._ended[number] = terminated or truncated
            if self._alone and self._ended[number]:
                robot.reset()
                self._ended[number] = False

    def close(self) -> None:
        for robot in self._robots:
            robot.close()


def peers(task: str) -> Contestants:
    published = {(PUBLISHED, size): Gymnasium(f"{task}BulletEnv-v0", size) for size in (ALONE, *FLEETS)}
    return {(WRAPPED, ALONE): Gymnasium(f"td3_robot/{task}-v0", ALONE), **published}


def main() -> int:
    parser = bench_sim.options("python benchmarks/sim_peers.py", "Compare simulation speed with the published robots.")
    options = parser.parse_args()
    with stdout_to_stderr():  # the published robots print text, which would corrupt the JSON
        import pybullet_envs_gymnasium  # noqa: F401  registers its robots
        import td3_robot_sims.gymnasium_env  # noqa: F401  registers ours

        report = bench_sim.measure(options, peers)
    for task in TASKS:
        for row in (report["one_robot"][task], *report["fleet"][task].values()):
            for name in [name for name in (OURS, WRAPPED) if name in row]:
                row[f"{name}_over_published"] = harness.ratio(row[name]["rounds"], row[PUBLISHED]["rounds"])
    report["machine"] = harness.describe("td3-robot", "pybullet", "numpy", "gymnasium", PUBLISHED)
    return harness.show(report, options.json, lines)


def lines(report: harness.Report) -> Iterator[str]:
    yield from bench_sim.lines(report)
    for task in TASKS:
        rows = {"one robot": report["one_robot"][task]}
        rows |= {f"{size} robots": row for size, row in report["fleet"][task].items()}
        for label, row in rows.items():
            for name in [name for name in (OURS, WRAPPED) if name in row]:
                yield f"{task:9} {label:10} {name:20} {row[f'{name}_over_published']:5.2f} × published"


if __name__ == "__main__":
    harness.run_script(main)
