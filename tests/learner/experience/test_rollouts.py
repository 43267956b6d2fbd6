"""A finished episode gives one rollout. A very long episode gives one rollout for each of its pieces.

An episode or piece with a gap gives no rollout.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from td3_robot.learner.experience import rollouts
from td3_robot.learner.experience.rollouts import Rollouts
from td3_robot.learner.experience.transitions import Assembler
from td3_robot.messages import Phase, Step

F, M, T, U = Phase.FIRST, Phase.MID, Phase.TERMINATED, Phase.TRUNCATED


class World:
    """Sends Steps of some robots to ``Rollouts``. A step's reward and observation are its number in the episode."""

    def __init__(self, make_step: Callable[..., Step], robots: int) -> None:
        self.make_step, self.robots = make_step, robots
        self.rollouts, self.assembler = Rollouts(0.5, 3, 2), Assembler()
        self.sequence = -1
        self.episode = np.full(robots, -1)
        self.number = np.zeros(robots, int)

    def step(self, *phases: Phase, lost: bool = False) -> None:
        """Send a Step with these phases of the robots. With ``lost``, the Step does not arrive."""
        first = np.array(phases) == Phase.FIRST
        self.sequence += 1
        self.episode += first
        self.number = np.where(first, 0, self.number + 1)
        step = self.make_step(
            self.sequence,
            self.robots,
            phase=np.array(phases, np.uint8),
            episode=self.episode.astype(np.uint64),
            episode_step=self.number.astype(np.uint32),
            reward=self.number.astype(np.float32),
            observation=np.repeat(self.number[:, None], 3, 1).astype(np.float32),
        )
        if not lost and (transitions := self.assembler.add(step)) is not None and len(transitions):
            self.rollouts.add(transitions, step)

    def rewards(self) -> list[list[float]]:
        """The rewards of all rollouts that are ready."""
        found = []
        while self.rollouts.ready:
            found.append(self.rollouts.take().reward[:, 0].tolist())
        return found


def test_a_task_without_a_time_limit_gives_batches_of_bounded_size(
    make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "LONGEST", 2)
    world = World(make_step, 1)
    world.step(F)
    for _ in range(5):
        world.step(M)
    assert world.rollouts.take().discount[:, 0].tolist() == [0.5, 0.5]
    world.step(M, lost=True)
    for phase in (M, M, M, T):
        world.step(phase)
    # Transition n ends at step n. Step 6 is lost, so transitions 6 and 7 are missing. A batch has LONGEST = 2
    # transitions. Without the loss, one batch would have transitions 5 and 6, and the next batch 7 and 8. Now both
    # batches are incomplete, so Rollouts drops them.
    assert world.rewards() == [[3, 4], [9, 10]]


def test_a_rollout_is_an_episode(make_step: Callable[..., Step]) -> None:
    world = World(make_step, 1)
    for phase in (F, M, M):
        world.step(phase)
    assert not world.rollouts.ready
    world.step(T)
    batch = world.rollouts.take()
    assert batch.reward[:, 0].tolist() == [1, 2, 3]
    assert batch.observation[:, 0].tolist() == [0, 1, 2]
    assert batch.next_observation[:, 0].tolist() == [1, 2, 3]
    assert batch.discount[:, 0].tolist() == [0.5, 0.5, 0]
    assert (batch.action.shape, world.rollouts.ready, world.rollouts.total_added) == ((3, 2), False, 3)
    for phase in (F, M, U):
        world.step(phase)
    # The episode is truncated, not terminated, so its last discount is 0.5, not 0.
    assert world.rollouts.take().discount[:, 0].tolist() == [0.5, 0.5]


def test_each_robot_has_its_own_episodes(make_step: Callable[..., Step]) -> None:
    world = World(make_step, 2)
    world.step(F, F)
    world.step(M, T)
    world.step(M, F)
    assert world.rewards() == [[1]]
    world.step(T, M)
    world.step(F, U)
    assert world.rewards() == [[1, 2, 3], [1, 2]]


def test_an_episode_with_a_gap_is_dropped(make_step: Callable[..., Step]) -> None:
    world = World(make_step, 1)
    for phase in (F, M, M):
        world.step(phase)
    world.step(M, lost=True)
    for phase in (M, M, T):
        world.step(phase)
    assert world.rewards() == []
    assert (world.assembler.counters["gaps"], world.assembler.counters["cut"]) == (1, 1)
    for phase in (F, M, T):
        world.step(phase)
    assert world.rewards() == [[1, 2]]


def test_restored_rollouts_continue(make_step: Callable[..., Step]) -> None:
    world = World(make_step, 2)
    world.step(F, F)
    world.step(M, T)
    world.step(M, F)
    arrays, scalars = world.rollouts.state()
    world.rollouts = Rollouts(0.5, 3, 2)
    world.rollouts.restore(arrays, json.loads(json.dumps(scalars)))
    world.step(T, M)
    assert world.rewards() == [[1], [1, 2, 3]]
