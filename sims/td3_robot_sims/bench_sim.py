"""``td3-robot bench sim``: simulation speed of this machine, and memory of a robot.

The benchmark compares contestants, such as one robot alone or a vector environment. Contestants with the same number of
robots execute the same random actions. In a vector environment, the benchmark counts a reset as a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from td3_robot.bench import harness
from td3_robot.bench.harness import Report
from td3_robot.specs import Float32
from td3_robot.util import machine
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.quiet import stdout_to_stderr
from td3_robot_sims.vector_env import VectorEnvironment

TASKS = ("Walker2D", "Ant")
ALONE = 0  # the size that stands for one robot without a vector environment
FLEETS = (1, 4, 16)  # robots in a vector environment
OURS = "td3_robot"
SEED = 0

Contestants = dict[tuple[str, int], Any]
"""Maps (name, number of robots or ALONE) to a contestant: an object with ``close()`` and ``step(action)``.

The action is float32[N, A], for N robots with A action channels. In a vector environment, ``step`` steps each robot, or
resets it if its episode has ended. With one robot alone, the call that ends an episode also resets the robot.
"""


def main(arguments: Sequence[str]) -> int:
    description = "Measure steps per second of the simulated robots, and the memory of a robot."
    given = options("td3-robot bench sim", description).parse_args(arguments)
    with stdout_to_stderr():
        report = measure(given)
    return harness.show(report, given.json, lines)


def options(command: str, description: str) -> harness.Options:
    parser = harness.Options(command, description, ("", "--json > sim.json", "--steps 5000 --rounds 9"))
    parser.number("--steps", 1000, "N", "steps in one measurement")
    parser.number("--rounds", 5, "N", "measurements of each variant")
    parser.number("--resets", 1000, "N", "number of resets in the memory test")
    return parser


def measure(options: argparse.Namespace, others: Callable[[str], Contestants] = lambda _: {}) -> Report:
    """Measure memory and speed of every task. ``others`` returns additional contestants for a task."""
    # Measure memory first. After the speed test, new robots would reuse freed memory, and seem to need less memory.
    used = {task: memory(task, options.resets) for task in TASKS}
    rows = {task: speeds(task, options, others(task)) for task in TASKS}
    return {
        "benchmark": "sim",
        "machine": harness.describe("td3-robot", "pybullet", "numpy"),
        "steps_per_block": options.steps,
        "rounds": options.rounds,
        "memory": used,
        "one_robot": {task: rows[task][ALONE] for task in TASKS},
        "fleet": {task: {str(size): rows[task][size] for size in FLEETS} for task in TASKS},
    }


def memory(task: str, resets: int) -> dict[str, Any]:
    """Measure the RAM of a robot, and how much the RAM of this process grows over many short episodes.

    Both numbers are in bytes. They are None if the system is not Linux.
    """
    robots = [tasks.make(task, SEED)]
    _play(robots[0], 20)
    before = machine.resident_bytes()
    for number in range(8):
        robots.append(tasks.make(task, number))
        _play(robots[-1], 1)
    with_others = machine.resident_bytes()
    _play(robots[0], resets)
    after = machine.resident_bytes()
    for robot in robots:
        robot.close()
    if before is None or with_others is None or after is None:
        return {"bytes_per_robot": None, "resets": resets, "growth_bytes": None}
    return {"bytes_per_robot": (with_others - before) // 8, "resets": resets, "growth_bytes": after - with_others}


def _play(environment: Environment, episodes: int) -> None:
    """Play episodes of three steps."""
    action = np.zeros(environment.spec.action_size, np.float32)
    for _ in range(episodes):
        environment.reset()
        for _ in range(3):
            environment.step(action)


class _Alone:
    """One robot without a vector environment."""

    def __init__(self, task: str) -> None:
        self._robot = tasks.make(task, SEED)
        self._robot.reset()
        self.close = self._robot.close

    def step(self, action: Float32) -> None:
        outcome = self._robot.step(action[0])
        if outcome.terminated or outcome.truncated:
            self._robot.reset()


def speeds(task: str, options: argparse.Namespace, others: Contestants) -> dict[int, dict[str, Any]]:
    """Measure robot steps per second for each number of robots."""
    fleets = {size: VectorEnvironment(lambda seed: tasks.make(task, seed), size, SEED, "bench", 0) for size in FLEETS}
    contestants: Contestants = {(OURS, ALONE): _Alone(task), **others}
    contestants |= {(OURS, size): fleet for size, fleet in fleets.items()}
    turns = {}
    for key, robots in contestants.items():
        rows = max(1, key[1])
        shape = -(-options.steps // rows), rows, tasks.spec(task).action_size
        actions = np.random.default_rng(SEED).uniform(-1, 1, shape).astype(np.float32)
        turns[key] = partial(speed, robots, actions)
    rates = harness.take_turns(turns, options.rounds, warm_up=True)
    for robots in contestants.values():
        robots.close()
    figures: dict[int, dict[str, Any]] = {size: {} for size in (ALONE, *FLEETS)}
    for (name, size), values in rates.items():
        figures[size][name] = harness.summary("steps_per_s", values)
    for size, fleet in fleets.items():
        over = harness.ratio(rates[OURS, size], rates[OURS, 1])
        figures[size] |= {f"{OURS}_over_one_robot": over, "threads": fleet.threads}
    return figures


def speed(robots: Any, actions: Float32) -> float:
    """Step N robots T times with ``actions``, float32[T, N, A]. Return the robot steps per second."""
    begin = time.perf_counter()
    for action in actions:
        robots.step(action)
    return actions[..., 0].size / (time.perf_counter() - begin)


def lines(report: Report) -> Iterator[str]:
    for task in TASKS:
        yield f"{task:9} one robot             {_rate(report['one_robot'][task][OURS])}"
        for size, row in report["fleet"][task].items():
            label, over = f"{task:9} {size:>2} robots, {row['threads']:>2} threads", row[f"{OURS}_over_one_robot"]
            yield f"{label} {_rate(row[OURS])}  {over:.2f} × 1 robot"
        used = report["memory"][task]
        if used["bytes_per_robot"] is not None:
            growth = f"{used['growth_bytes'] / 1e6:+.2f} MB over {used['resets']} resets"
            yield f"{task:9} {used['bytes_per_robot'] / 1e6:.1f} MB a robot; {growth}"


def _rate(figures: Mapping[str, Any]) -> str:
    return f"{figures['steps_per_s']:8.0f} steps/s [{figures['lowest']:.0f}, {figures['highest']:.0f}]"
