"""Several robots step together: their phases, episodes, seeds and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Outcome
from td3_robot_sims.vector_env import VectorEnvironment

from td3_robot.config.randomization import PushConfig, RandomizationConfig
from td3_robot.errors import NodeError
from td3_robot.messages import Phase
from td3_robot.specs import Float32


@pytest.fixture
def envs(scripted: Callable[..., Any]) -> Callable[..., VectorEnvironment]:
    def make(*scripts: list[tuple[int, bool, bool]]) -> VectorEnvironment:
        made = [scripted(script) for script in scripts]
        return VectorEnvironment(lambda _: made.pop(0), len(scripts), 0, "sim-0", 0)

    return make


def test_each_robot_has_its_phases_and_episode_numbers(envs: Callable[..., VectorEnvironment]) -> None:
    """Robot 0 terminates after 2 steps. Robot 1 is truncated after 3 steps.

    Robot 2 terminates and is truncated after 1 step. Its phase is then TERMINATED.
    """
    robots = envs([(2, True, False)], [(3, False, True)], [(1, True, True)])
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


def test_reward_and_action_are_zero_after_a_reset(envs: Callable[..., VectorEnvironment]) -> None:
    robots = envs([(1, True, False)], [(5, True, False)])
    for number in range(3):
        robots.step(np.full((2, 2), number + 1, np.float32))
    assert robots.phase.tolist() == [Phase.FIRST, Phase.MID]
    assert robots.reward.tolist() == [0, 2]
    assert robots.action.tolist() == [[0, 0], [3, 3]]


def test_starting_states_are_repeatable_and_differ_by_robot_source_restart_and_seed() -> None:
    def starts(source: str, incarnation: int, seed: int = 3) -> Float32:
        robots = VectorEnvironment(lambda number: tasks.make("Walker2D", number), 2, seed, source, incarnation)
        robots.step(robots.action)
        robots.close()
        return robots.observation.copy()

    reference = starts("sim-0", 0)
    assert np.array_equal(reference, starts("sim-0", 0))
    assert not np.array_equal(reference[0], reference[1])
    for other in (starts("sim-1", 0), starts("sim-0", 1), starts("sim-0", 0, seed=4)):
        assert not np.array_equal(reference, other)


@pytest.mark.parametrize(("number", "reward"), [(np.nan, float("inf")), (0.0, float("nan")), (0.0, -1e39)])
def test_diverged_physics_truncates_the_episode(
    envs: Callable[..., VectorEnvironment], monkeypatch: pytest.MonkeyPatch, number: float, reward: float
) -> None:
    """The Step has the last finite observation, reward 0 and the phase TRUNCATED. Then a new episode begins."""
    robots = envs([(9, True, False)])
    robots.step(robots.action)
    robots.step(robots.action)
    sound = robots.observation.copy()
    broken = Outcome(np.full(3, number, np.float32), reward, terminated=False, truncated=False)
    monkeypatch.setattr(robots._environments[0], "step", lambda _: broken)
    robots.step(robots.action)
    assert robots.phase.tolist() == [Phase.TRUNCATED]
    assert np.array_equal(robots.observation, sound)
    assert (robots.reward.tolist(), robots.not_finite) == ([0], 1)
    robots.step(robots.action)
    assert robots.phase.tolist() == [Phase.FIRST]


def test_the_log_names_what_was_not_finite_at_the_first_second_fourth_and_eighth_time(
    envs: Callable[..., VectorEnvironment], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In nine episodes, observation 2 is infinite. In one more episode, the reward is too large for float32."""
    robots = envs([(9, True, False)])
    name = robots.spec.observations[2].name
    outcomes = [Outcome(np.array([0, 0, np.inf], np.float32), 1.0, terminated=False, truncated=False)] * 9
    outcomes.insert(3, Outcome(np.zeros(3, np.float32), 1e39, terminated=False, truncated=False))
    monkeypatch.setattr(robots._environments[0], "step", lambda _: outcomes.pop(0))
    for _ in range(20):  # resets alternate with steps
        robots.step(robots.action)
    observation, reward = f"observation 2 ({name!r}) is inf", "the reward is 1e+39"
    rest = "; it must be finite in float32, so the episode is truncated"
    assert [record.getMessage() for record in caplog.records] == [
        f"task 'toy:Scripted': {observation}{rest}",
        f"task 'toy:Scripted': {observation}{rest} (2 times so far)",
        f"task 'toy:Scripted': {reward}{rest} (4 times so far)",
        f"task 'toy:Scripted': {observation}{rest} (8 times so far)",
    ]


def test_a_first_observation_that_is_not_finite_is_an_error(
    envs: Callable[..., VectorEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the error, the robot would wait forever: receivers refuse the Step. The error is one line."""
    robots = envs([(1, True, False)], [(1, True, False)])
    robots.step(robots.action)
    robots.step(robots.action)
    monkeypatch.setattr(robots._environments[1], "reset", lambda: np.array([0, np.nan, np.inf], np.float32))
    what = f"observation 1 ({robots.spec.observations[1].name!r}) is nan"
    with pytest.raises(NodeError) as failed:
        robots.step(robots.action)
    assert str(failed.value) == f"task 'toy:Scripted': after a reset, {what}; it must be finite"


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", tasks.names())
def test_the_number_of_threads_changes_nothing(task: str, seed: int) -> None:
    """Six robots give the same bits with one thread as with five. In most tasks, the 120 steps include resets."""
    ranges = RandomizationConfig(mass=(0.8, 1.2), push=PushConfig(force=(10.0, 50.0)))
    alone, together = (
        VectorEnvironment(lambda number: tasks.make(task, number, ranges), 6, seed, "sim-0", 0, threads=threads)
        for threads in (1, 5)
    )
    random = np.random.default_rng(seed)
    begun = 0
    for _ in range(120):
        action = random.uniform(-1.5, 1.5, alone.action.shape).astype(np.float32)
        assert alone.step(action) == together.step(action)
        for name in ("observation", "reward", "phase", "episode", "episode_step", "action"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together, name), name)
        assert alone.world == together.world
        assert list(alone.world) == list(together.world)
        begun += int((alone.phase == Phase.FIRST).sum())
    if task not in ("Ant", "HalfCheetah"):  # these robots seldom or never fall
        assert begun > 6, "no robot was reset during the steps"
    alone.close()
    together.close()


def test_by_default_there_is_one_thread_per_core_but_at_most_one_per_robot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that calls ``step`` counts as one of the threads. The pool starts the other threads."""
    monkeypatch.setattr("td3_robot_sims.vector_env.available_cores", lambda: 3)

    def threads(task: str, robots: int) -> set[str]:
        before = set(threading.enumerate())
        envs = VectorEnvironment(lambda number: tasks.make(task, number), robots, 0, "sim-0", 0)
        names = {thread.name for thread in set(threading.enumerate()) - before}
        envs.close()
        assert set(threading.enumerate()) <= before
        return names

    assert threads("Hopper", 1) == set()
    assert threads("Hopper", 2) == {"pool-1"}
    assert threads("Hopper", 5) == {"pool-1", "pool-2"}
    assert threads("gymnasium:Pendulum-v1", 5) == set(), "some of Gymnasium's tasks are not thread-safe"


def test_a_failure_in_a_thread_is_raised() -> None:
    """The error shows the wrong action, and the threads continue."""
    envs = VectorEnvironment(lambda number: tasks.make("Hopper", number), 4, 0, "sim-0", 0, threads=3)
    envs.step(envs.action)
    action = np.zeros((4, 3), np.float32)
    action[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"Hopper: action \[0.0, nan, 0.0\] is not finite"):
        envs.step(action)
    assert envs.step(np.zeros((4, 3), np.float32)) == 4
    envs.close()
