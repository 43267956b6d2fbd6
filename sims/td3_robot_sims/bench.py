"""``td3-robot bench sim``: how fast robots are simulated, beside the published ones, and what memory one takes.

Contestants take turns, block by block, and each block begins with another of them, so that a noisy machine treats them
alike. A figure is the median over the blocks; a ratio is the median of the ratios within one round. All step through
the same random actions, and through the resets these lead to, which count as part of the work.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import gymnasium
import numpy as np

from td3_robot.errors import Td3RobotError, UsageError
from td3_robot.runtime.node import Parser
from td3_robot.specs import Float32
from td3_robot.util import machine
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.quiet import c_output_on_stderr
from td3_robot_sims.vector_env import VectorEnvironment

TASKS = ("Walker2D", "Ant")
FLEETS = (1, 4, 16)
PUBLISHED = "pybullet_envs_gymnasium"
PUBLISHED_VERSION = "0.6.0"
OURS = "td3_robot"
WRAPPED = "td3_robot_gymnasium"  # as gymnasium.make gives it, with the wrappers that the published one has too
_SEED = 0

_EXAMPLES = """examples:
  td3-robot bench sim
  td3-robot bench sim --json > sim.json
  td3-robot bench sim --steps 5000 --rounds 9
"""

_Name = TypeVar("_Name")
Block = Callable[[], None]
"""Runs some steps; who calls it takes the time."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot bench sim",
        description="Measure steps per second of our robots and of the published ones, and the memory of a robot.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="of one block (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="blocks of each (default: %(default)s)")
    parser.add_argument("--resets", type=int, default=1000, metavar="N", help="for memory (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for name in ("steps", "rounds", "resets"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    _need_published()
    with c_output_on_stderr():  # the published robots print as they connect, which would spoil the JSON
        report = measure(options.steps, options.rounds, options.resets)
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 0


def measure(steps: int, rounds: int, resets: int) -> dict[str, Any]:
    """The whole report, as plain JSON values."""
    return {
        "benchmark": "sim",
        "machine": machine.describe(("td3-robot", "pybullet", "numpy", "gymnasium", PUBLISHED)),
        "steps_per_block": steps,
        "rounds": rounds,
        # Memory first: what later parts free would be reused, and not seen.
        "memory": {task: memory(task, resets) for task in TASKS},
        "one_robot": {task: one_robot(task, steps, rounds) for task in TASKS},
        "fleet": {task: fleets(task, steps, rounds) for task in TASKS},
    }


def memory(task: str, resets: int, robots: int = 8) -> dict[str, Any]:
    """Bytes in RAM that one more robot takes, and by which one robot grows over many resets with a few steps each.

    None where the system does not tell.
    """
    first = tasks.make(task, _SEED)
    others: list[Environment] = []
    action = np.zeros(first.spec.action_size, np.float32)
    _episodes(first, action, 20)
    before = machine.resident_bytes()
    for number in range(robots):
        others.append(tasks.make(task, number))
        _episodes(others[-1], action, 1)
    with_others = machine.resident_bytes()
    _episodes(first, action, resets)
    after = machine.resident_bytes()
    for environment in (first, *others):
        environment.close()
    if before is None or with_others is None or after is None:
        return {"bytes_per_robot": None, "resets": resets, "growth_bytes": None}
    return {
        "bytes_per_robot": (with_others - before) // robots,
        "resets": resets,
        "growth_bytes": after - with_others,
    }


def _episodes(environment: Environment, action: Float32, count: int) -> None:
    for _ in range(count):
        environment.reset()
        for _ in range(3):
            environment.step(action)


def one_robot(task: str, steps: int, rounds: int) -> dict[str, Any]:
    """Steps a second of one robot: ours, ours as a Gymnasium environment, and the published one."""
    importlib.import_module("td3_robot_sims.gymnasium_env")
    ours = tasks.make(task, _SEED)
    actions = _actions(steps, ours.spec.action_size)
    wrapped = gymnasium.make(f"td3_robot/{task}-v0", disable_env_checker=True)
    published = gymnasium.make(f"{task}BulletEnv-v0", disable_env_checker=True)
    wrapped.reset(seed=_SEED)
    published.reset(seed=_SEED)
    ours.reset()

    def step_ours() -> None:
        for action in actions:
            outcome = ours.step(action)
            if outcome.terminated or outcome.truncated:
                ours.reset()

    def stepper(env: gymnasium.Env[Any, Any]) -> Block:
        def step() -> None:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        return step

    blocks = {OURS: step_ours, WRAPPED: stepper(wrapped), PUBLISHED: stepper(published)}
    seconds = take_turns(blocks, rounds)
    for env in (ours, wrapped, published):
        env.close()
    ratios = {f"{name}_over_published": _times_as_fast(seconds[name], seconds[PUBLISHED]) for name in (OURS, WRAPPED)}
    return {name: speed(steps, times) for name, times in seconds.items()} | ratios


def fleets(task: str, steps: int, rounds: int) -> dict[str, Any]:
    """Robot steps a second (resets count as steps) of processes with several robots each, ours and published ones.

    All take turns, of every size, so that a ratio over one robot is one within a round too.
    """
    contestants: dict[tuple[str, int], VectorEnvironment | _Published] = {}
    for size in FLEETS:
        contestants[OURS, size] = VectorEnvironment(lambda seed: tasks.make(task, seed), size, _SEED, "bench", 0)
        contestants[PUBLISHED, size] = _Published(task, size)
    calls = {size: -(-steps // size) for size in FLEETS}
    blocks: dict[tuple[str, int], Block] = {}
    for (name, size), fleet in contestants.items():
        actions = _actions(calls[size] * size, tasks.spec(task).action_size).reshape(calls[size], size, -1)
        blocks[name, size] = partial(_step_all, fleet, actions)
    seconds = take_turns(blocks, rounds)
    for fleet in contestants.values():
        fleet.close()
    each = {(name, size): [time / (calls[size] * size) for time in times] for (name, size), times in seconds.items()}
    return {
        str(size): {
            **{name: speed(calls[size] * size, seconds[name, size]) for name in (OURS, PUBLISHED)},
            f"{OURS}_over_published": _times_as_fast(each[OURS, size], each[PUBLISHED, size]),
            f"{OURS}_over_one_robot": _times_as_fast(each[OURS, size], each[OURS, 1]),
            "threads": contestants[OURS, size].threads,
        }
        for size in FLEETS
    }


class _Published:
    """Published robots, stepped as a fleet steps ours: a step that resets a robot does nothing else with it."""

    threads = 1

    def __init__(self, task: str, size: int) -> None:
        self._robots = [gymnasium.make(f"{task}BulletEnv-v0", disable_env_checker=True) for _ in range(size)]
        self._ended = [False] * size
        for number, robot in enumerate(self._robots):
            robot.reset(seed=number)

    def step(self, action: Float32) -> None:
        for number, robot in enumerate(self._robots):
            if self._ended[number]:
                robot.reset()
                self._ended[number] = False
            else:
                _, _, terminated, truncated, _ = robot.step(action[number])
                self._ended[number] = terminated or truncated

    def close(self) -> None:
        for robot in self._robots:
            robot.close()


def _step_all(fleet: VectorEnvironment | _Published, actions: Float32) -> None:
    for action in actions:
        fleet.step(action)


def _times_as_fast(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds of how many times less one took than the other."""
    return statistics.median(b / a for a, b in zip(mine, theirs, strict=True))


def take_turns(blocks: dict[_Name, Block], rounds: int) -> dict[_Name, list[float]]:
    """Seconds of every block, a round at a time; a round that is not counted comes first."""
    names = list(blocks)
    seconds: dict[_Name, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            blocks[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def speed(steps: int, seconds: Sequence[float]) -> dict[str, float]:
    """Steps a second over blocks of ``steps``: median, lowest and highest."""
    rates = [steps / value for value in seconds]
    return {"steps_per_s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}


def _actions(steps: int, size: int) -> Float32:
    return np.random.default_rng(_SEED).uniform(-1, 1, (steps, size)).astype(np.float32)


def _need_published() -> None:
    try:
        importlib.import_module(PUBLISHED)
    except ModuleNotFoundError:
        raise UsageError(
            f"the robots to compare with are not installed; pip install '{PUBLISHED}=={PUBLISHED_VERSION}'"
        ) from None


def _text(report: dict[str, Any]) -> str:
    computer = report["machine"]
    lines = [f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before"]
    for task in TASKS:
        rows = report["one_robot"][task]
        for name in (OURS, WRAPPED, PUBLISHED):
            ratio = rows.get(f"{name}_over_published", 1.0)
            lines.append(f"{task:9} {name:24} {_rate(rows[name])}  {ratio:5.2f} × published")
        for size, row in report["fleet"][task].items():
            published, one = row[f"{OURS}_over_published"], row[f"{OURS}_over_one_robot"]
            lines.append(
                f"{task:9} {size:>2} robots, {row['threads']:>2} threads   {_rate(row[OURS])}  "
                f"{published:5.2f} × published, {one:.2f} × one robot"
            )
        used = report["memory"][task]
        if used["bytes_per_robot"] is not None:
            lines.append(
                f"{task:9} {used['bytes_per_robot'] / 1e6:.1f} MB a robot; "
                f"{used['growth_bytes'] / 1e6:+.2f} MB over {used['resets']} resets"
            )
    return "\n".join(lines)


def _rate(row: dict[str, float]) -> str:
    return f"{row['steps_per_s']:8.0f} steps/s [{row['lowest']:.0f}, {row['highest']:.0f}]"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Td3RobotError as error:
        print(f"td3-robot bench sim: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
