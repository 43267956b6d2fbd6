"""A simulation of the learner's queue: sources send Steps in real time, and the learner's main thread takes the Steps.

A *turn* is one pass of this thread's loop. The thread takes the waiting Steps that it can read in 1 ms. A turn costs
``turn + turn_source · sources``. Each Step of the turn also costs ``step + step_robot · robots``. On a shared machine,
other processes interrupt the thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_DRAIN = 0.001  # seconds in which the learner reads Steps in a turn
_READ = 0.25  # reading a Step takes this share of the Step's whole cost
_IDLE = 0.05  # longest time in s that a learner without Steps waits before its next turn


class Costs(NamedTuple):
    """Processor time of the learner's main thread, in s. The text at the top of this file explains each cost."""

    turn: float
    turn_source: float
    step: float
    step_robot: float

    def of_turn(self, sources: int, robots: int, steps: int) -> float:
        return self.turn + self.turn_source * sources + steps * (self.step + self.step_robot * robots)


class Outcome(NamedTuple):
    """Result of a simulation.

    Attributes:
        steps_per_s: Steps per second that the learner took.
        busy: share of the time in which the learner's thread computed.
        turns_per_step: turns divided by Steps.
        delay_ms: 99th percentile of the time from a Step's arrival to the end of its turn.
        waiting: Steps that wait at the end.
    """

    steps_per_s: float
    busy: float
    turns_per_step: float
    delay_ms: float
    waiting: int


def fit(cells: Sequence[Mapping[str, Any]]) -> Costs:
    """Fit the costs to the measurements of scale.py (least squares of the relative errors)."""
    rows = np.array(
        [(it["turns_per_step"], it["turns_per_step"] * it["sources"], 1.0, float(it["robots"])) for it in cells]
    )
    measured = np.array([it["main_us"] for it in cells])
    weighted = rows / measured[:, None]
    best, error = np.zeros(4), np.inf
    for used in range(1, 16):  # costs must not be negative: fit each subset of the costs, and use 0 for the others
        columns = [index for index in range(4) if used >> index & 1]
        found = np.linalg.lstsq(weighted[:, columns], np.ones(len(cells)), rcond=None)[0]
        costs = np.zeros(4)
        costs[columns] = found
        missed = float(np.square(weighted @ costs - 1).sum())
        if (found >= 0).all() and missed < error - 1e-12:
            best, error = costs, missed
    return Costs(*(best / 1e6).tolist())


def simulate(
    sources: int,
    robots: int,
    rate: float,
    costs: Costs,
    *,
    seconds: float = 10.0,
    share: float = 1.0,
    run: float = 0.003,
) -> Outcome:
    """Simulate sources that each send a Step every 1/rate seconds.

    Args:
        share: when the thread wants to run, it has a processor core for this share of the time.
        run: seconds for which the thread keeps the processor core when other processes wait for the core.
    """
    rng = np.random.default_rng(0)
    due = [float(start) for start in rng.uniform(0, 1 / rate, sources)]
    heapq.heapify(due)
    waiting: list[float] = []
    delays: list[float] = []
    now = busy = 0.0
    turns, left = 0, run
    most = max(1, int(_DRAIN / (_READ * (costs.step + costs.step_robot * robots))))
    pause = run * (1 - share) / share

    def arrive() -> None:
        while due[0] <= now:
            waiting.append(due[0])
            heapq.heapreplace(due, due[0] + 1 / rate)

    while now < seconds:
        arrive()
        if not waiting:
            now = min(due[0], now + _IDLE)
            arrive()
            if share < 1:  # the thread has slept, so it first waits for a processor core
                now += float(rng.exponential(pause))
                arrive()
        taken, waiting = waiting[:most], waiting[most:]
        cost = costs.of_turn(sources, robots, len(taken))
        busy, left, turns = busy + cost, left - cost, turns + 1
        now += cost
        while left < 0:
            left, now = left + run, now + pause
        delays += [now - arrived for arrived in taken]
    taken_steps = max(len(delays), 1)
    delay = float(np.percentile(delays, 99)) * 1e3 if delays else 0.0
    return Outcome(len(delays) / now, busy / now, turns / taken_steps, delay, len(waiting))


def most_sources(robots: int, rate: float, costs: Costs) -> int:
    """Return the largest number of sources for which the queue does not grow.

    The result is at most 8192, and can be up to 2 % too low.
    """
    low, high = 1, 8192
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        outcome = simulate(middle, robots, rate, costs, seconds=2.0)
        low, high = (middle, high) if outcome.steps_per_s >= 0.98 * middle * rate else (low, middle)
    return low
