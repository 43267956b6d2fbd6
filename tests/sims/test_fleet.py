"""Robots stepped together: phases, episodes, seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sims import tasks
from sims.environment import Environment, Outcome
from sims.fleet import Fleet
from td3_robot.messages import Phase
from td3_robot.specs import Float32


@pytest.fixture
def fleet(scripted: Callable[..., Any]) -> Callable[..., Fleet]:
    def make(*scripts: list[tuple[int, bool, bool]]) -> Fleet:
        made = [scripted(script) for script in scripts]
        return Fleet(lambda _: made.pop(0), len(scripts), 0, "sim-0", 0)

    return make


def test_phases_by_hand(fleet: Callable[..., Fleet]) -> None:
    """Robot 0: two steps, terminated. Robot 1: three steps, truncated. Robot 2: one step, both: a termination."""
    robots = fleet([(2, True, False)], [(3, False, True)], [(1, True, True)])
    rows = []
    for number in range(6):
        stepped = robots.step(np.full((3, 2), number, np.float32))
        rows.append((stepped, robots.phase.tolist(), robots.episode.tolist(), robots.episode_step.tolist()))
    first, mid, terminated, truncated = Phase
    assert rows == [
        (0, [first, first, first], [0, 0, 0], [0, 0, 0]),
        (3, [mid, mid, terminated], [0, 0, 0], [1, 1, 1]),
        (2, [terminated, mid, first], [0, 0, 1], [2, 2, 0]),
        (2, [first, truncated, terminated], [1, 0, 1], [0, 3, 1]),
        (1, [mid, first, first], [1, 1, 2], [1, 0, 0]),
        (3, [terminated, mid, terminated], [1, 1, 2], [2, 1, 1]),
    ]


def test_a_reset_row_has_neither_reward_nor_action(fleet: Callable[..., Fleet]) -> None:
    robots = fleet([(1, True, False)], [(5, True, False)])
    for number in range(3):
        robots.step(np.full((2, 2), number + 1, np.float32))
    assert robots.phase.tolist() == [Phase.FIRST, Phase.MID]
    assert robots.reward.tolist() == [0, 2]
    assert robots.action.tolist() == [[0, 0], [3, 3]]


def test_robots_sources_and_restarts_start_differently_and_repeatably() -> None:
    def starts(source: str, incarnation: int, seed: int = 3) -> Float32:
        robots = Fleet(lambda number: tasks.make("Walker2D", number), 2, seed, source, incarnation)
        robots.step(robots.action)
        robots.close()
        return robots.observation.copy()

    reference = starts("sim-0", 0)
    assert np.array_equal(reference, starts("sim-0", 0))
    assert not np.array_equal(reference[0], reference[1])
    for other in (starts("sim-1", 0), starts("sim-0", 1), starts("sim-0", 0, seed=4)):
        assert not np.array_equal(reference, other)


@pytest.mark.parametrize("task", ["Walker2D", "Ant"])
def test_environments_fit_the_protocol(task: str) -> None:
    environment: Environment = tasks.make(task, 0)
    observation = environment.reset()
    assert observation.shape == (environment.spec.observation_size,)
    assert observation.dtype == np.float32
    environment.close()


def test_physics_that_comes_apart_ends_the_episode(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published stays finite: the last sound observation, no reward, TRUNCATED; then a new episode."""
    robots = fleet([(9, True, False)])
    robots.step(robots.action)
    robots.step(robots.action)
    sound = robots.observation.copy()
    broken = Outcome(np.full(3, np.nan, np.float32), float("inf"), terminated=False, truncated=False)
    monkeypatch.setattr(robots._environments[0], "step", lambda _: broken)
    robots.step(robots.action)
    assert robots.phase.tolist() == [Phase.TRUNCATED]
    assert np.array_equal(robots.observation, sound)
    assert (robots.reward.tolist(), robots.not_finite) == ([0], 1)
    robots.step(robots.action)
    assert robots.phase.tolist() == [Phase.FIRST]
