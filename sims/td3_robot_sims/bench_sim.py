"""``td3-robot bench sim``: simulation speed beside the published robots, and memory of a robot.

All contestants step through the same random actions, and through the resets that these lead to. Resets count as work.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from td3_robot.bench import harness
from td3_robot.bench.harness import Report, ratio, seconds_of, take_turns
from td3_robot.errors import UsageError
from td3_robot.specs import Float32
from td3_robot.util import machine
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.quiet import c_output_on_stderr
from td3_robot_sims.vector_env import VectorEnvironment

TASKS = ("Walker2D", "Ant")
FLEETS = (1, 4, 16)
PUBLISHED = "pybullet_envs_gymnasium"
OURS = "td3_robot"
WRAPPED = "td3_robot_gymnasium"  # from gymnasium.make(), which adds the same wrappers to the published robot
_SEED = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.Options(
        "td3-robot bench sim",
        "Measure steps per second of our robots and of the published ones, and the memory of a robot.",
        ("", "--json > sim.json", "--steps 5000 --rounds 9"),
    )
    parser.number("--steps", 1000, "N", "steps in one turn")
    parser.number("--rounds", 5, "N", "turns of each contestant")
    parser.number("--resets", 1000, "N", "resets over which to watch memory")
    options = parser.parse(arguments)
    if lack := harness.not_installed(PUBLISHED):
        raise UsageError(lack)
    with c_output_on_stderr():  # the published robots print when they connect, which would corrupt the JSON
        importlib.import_module(PUBLISHED)  # registers its robots
        report: Report = {
            "benchmark": "sim",
            "machine": harness.describe("td3-robot", "pybullet", "numpy", "gymnasium", PUBLISHED),
            "steps_per_block": options.steps,
            "rounds": options.rounds,
            # Memory first: later parts free memory that a new robot would reuse unnoticed.
            "memory": {task: memory(task, options.resets) for task in TASKS},
            "one_robot": {task: one_robot(task, options.steps, options.rounds) for task in TASKS},
            "fleet": {task: fleets(task, options.steps, options.rounds) for task in TASKS},
        }
    return harness.show(report, options.json, _lines)


def memory(task: str, resets: int, robots: int = 8) -> dict[str, Any]:
    """Bytes of RAM for one more robot, and growth of one robot over many resets with a few steps each.

    Values are None where the system does not tell.
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
    """Steps per second of one robot: ours, ours as a Gymnasium environment, and the published one."""
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

    def step_gymnasium(env: gymnasium.Env[Any, Any]) -> None:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    blocks: dict[str, Callable[[], None]] = {
        OURS: step_ours,
        WRAPPED: partial(step_gymnasium, wrapped),
        PUBLISHED: partial(step_gymnasium, published),
    }
    seconds = take_turns({name: seconds_of(run) for name, run in blocks.items()}, rounds, warm_up=True)
    for env in (ours, wrapped, published):
        env.close()
    ratios = {f"{name}_over_published": ratio(seconds[PUBLISHED], seconds[name]) for name in (OURS, WRAPPED)}
    return {name: speed(steps, times) for name, times in seconds.items()} | ratios


def fleets(task: str, steps: int, rounds: int) -> dict[str, Any]:
    """Robot steps per second of processes with several robots each, ours and published ones; resets count as steps.

    Fleets of all sizes take turns with each other, so that a ratio to one robot is a ratio within one round, too.
    """
    contestants: dict[tuple[str, int], VectorEnvironment | _Published] = {}
    for size in FLEETS:
        contestants[OURS, size] = VectorEnvironment(lambda seed: tasks.make(task, seed), size, _SEED, "bench", 0)
        contestants[PUBLISHED, size] = _Published(task, size)
    calls = {size: -(-steps // size) for size in FLEETS}
    blocks = {}
    for (name, size), fleet in contestants.items():
        actions = _actions(calls[size] * size, tasks.spec(task).action_size).reshape(calls[size], size, -1)
        blocks[name, size] = seconds_of(partial(_step_all, fleet, actions))
    seconds = take_turns(blocks, rounds, warm_up=True)
    for fleet in contestants.values():
        fleet.close()
    each = {(name, size): [time / (calls[size] * size) for time in times] for (name, size), times in seconds.items()}
    return {
        str(size): {
            **{name: speed(calls[size] * size, seconds[name, size]) for name in (OURS, PUBLISHED)},
            f"{OURS}_over_published": ratio(each[PUBLISHED, size], each[OURS, size]),
            f"{OURS}_over_one_robot": ratio(each[OURS, 1], each[OURS, size]),
            "threads": contestants[OURS, size].threads,
        }
        for size in FLEETS
    }


class _Published:
    """Published robots, stepped as our fleet steps ours: a step that resets a robot does nothing else with it."""

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


def speed(steps: int, seconds: Sequence[float]) -> dict[str, float]:
    """Steps per second of turns of ``steps``: median, lowest and highest."""
    return harness.summary("steps_per_s", [steps / value for value in seconds])


def _actions(steps: int, size: int) -> Float32:
    return np.random.default_rng(_SEED).uniform(-1, 1, (steps, size)).astype(np.float32)


def _lines(report: Report) -> Iterator[str]:
    for task in TASKS:
        rows = report["one_robot"][task]
        for name in (OURS, WRAPPED, PUBLISHED):
            yield f"{task:9} {name:24} {_rate(rows[name])}  {rows.get(f'{name}_over_published', 1.0):5.2f} × published"
        for size, row in report["fleet"][task].items():
            yield (
                f"{task:9} {size:>2} robots, {row['threads']:>2} threads   {_rate(row[OURS])}  "
                f"{row[f'{OURS}_over_published']:5.2f} × published, {row[f'{OURS}_over_one_robot']:.2f} × one robot"
            )
        used = report["memory"][task]
        if used["bytes_per_robot"] is not None:
            yield (
                f"{task:9} {used['bytes_per_robot'] / 1e6:.1f} MB a robot; "
                f"{used['growth_bytes'] / 1e6:+.2f} MB over {used['resets']} resets"
            )


def _rate(row: dict[str, float]) -> str:
    return f"{row['steps_per_s']:8.0f} steps/s [{row['lowest']:.0f}, {row['highest']:.0f}]"
