"""Tests how Steps become transitions, with lost and repeated Steps, restarts, and episodes of any length."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.learner.experience.transitions import Assembler
from td3_robot.messages import Phase, Step


def history(ends: list[list[tuple[int, bool]]], length: int, incarnation: int) -> list[Step]:
    """Return ``length`` Steps of a source. An observation is (incarnation, robot, episode, step).

    The reward of a robot is the number of its step in the episode.

    ``ends`` has one list for each robot. An item of the list is one episode: (number of transitions, whether it
    terminates). An episode that does not terminate is truncated. After the last item, the robot repeats its list.
    """
    robots = len(ends)
    episode, step = np.zeros(robots, np.uint64), np.zeros(robots, np.uint32)
    phase = np.zeros(robots, np.uint8)
    result = []
    transitions = 0
    for sequence in range(length):
        if sequence:
            for robot in range(robots):
                if phase[robot] >= Phase.TERMINATED:
                    episode[robot] += 1
                    step[robot], phase[robot] = 0, Phase.FIRST
                    continue
                step[robot] += 1
                transitions += 1
                limit, terminates = ends[robot][int(episode[robot]) % len(ends[robot])]
                over = Phase.TERMINATED if terminates else Phase.TRUNCATED
                phase[robot] = over if step[robot] >= limit else Phase.MID
        who = np.stack(
            [np.full(robots, incarnation, float), np.arange(robots), episode.astype(float), step.astype(float)], 1
        )
        first = phase == Phase.FIRST
        result.append(
            Step(
                source="s",
                incarnation=incarnation,
                sequence=sequence,
                transitions=transitions,
                stamp=0,
                phase=phase.copy(),
                episode=episode.copy(),
                episode_step=step.copy(),
                observation=who.astype(np.float32),
                reward=np.where(first, 0, step).astype(np.float32),
                action=np.where(first[:, None], 0, who[:, :2]).astype(np.float32),
                origin=0 if first.all() else 1,
                answered=max(0, sequence - 1),
                weights_version=0,
                noise_kind=0,
                noise_seed=0,
                needs_version=0,
                world={},
            )
        )
    return result


ends = st.lists(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4), min_size=1, max_size=3)


@given(
    data=st.data(),
    robots=ends,
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
def test_no_transition_crosses_an_episode_end_or_a_gap(data: st.DataObject, robots: Any, lengths: list[int]) -> None:
    """The assembler joins two Steps if they are consecutive Steps of one episode, and joins no other Steps.

    Some Steps are lost or repeated.
    """
    stream = [step for number, length in enumerate(lengths) for step in history(robots, length, number)]
    fates = data.draw(
        st.lists(st.sampled_from(["kept", "kept", "lost", "twice"]), min_size=len(stream), max_size=len(stream))
    )
    received = [step for step, fate in zip(stream, fates, strict=True) if fate != "lost"]
    assembler = Assembler()
    joined = []
    for step, fate in zip(stream, fates, strict=True):
        for _ in range({"kept": 1, "twice": 2, "lost": 0}[fate]):
            transitions = assembler.add(step)
            joined += (
                []
                if transitions is None
                else [
                    (tuple(map(int, a)), tuple(map(int, b)), bool(t), float(r))
                    for a, b, t, r in zip(
                        transitions.observation,
                        transitions.next_observation,
                        transitions.terminated,
                        transitions.reward,
                        strict=True,
                    )
                ]
            )
    expected = []
    for before, after in itertools.pairwise(received):
        if (after.incarnation, after.sequence) != (before.incarnation, before.sequence + 1):
            continue  # a gap or a restart
        for robot in range(len(robots)):
            if after.phase[robot] != Phase.FIRST:
                expected.append(
                    (
                        tuple(map(int, before.observation[robot])),
                        tuple(map(int, after.observation[robot])),
                        bool(after.phase[robot] == Phase.TERMINATED),
                        float(after.reward[robot]),
                    )
                )
    assert joined == expected
    for before, after, _, _ in joined:
        assert before[:3] == after[:3]  # same incarnation, robot, episode
        assert after[3] == before[3] + 1
    assert assembler.counters["transitions"] == len(expected)
    assert assembler.counters["repeated"] == fates.count("twice")
    # A lost Step counts as missed only if a later Step of the same incarnation arrives.
    missed = 0
    for incarnation in range(len(lengths)):
        seen = [step.sequence for step in received if step.incarnation == incarnation]
        missed += max(seen) + 1 - len(seen) if seen else 0
    assert assembler.counters["missed"] == missed


def test_only_complete_episodes_are_reported() -> None:
    """Each episode has the rewards 1, 2 and 3, so its return is 6. The first episode lacks its FIRST Step."""
    assembler = Assembler()
    ended = [
        value
        for step in history([[(3, True)]], 12, 0)[1:]
        if (transitions := assembler.add(step))
        for value in transitions.ended
    ]
    assert ended == [(6.0, 3), (6.0, 3)]


def test_truncation_is_not_termination() -> None:
    assembler = Assembler()
    steps = history([[(2, False), (2, True)]], 6, 0)  # FIRST MID TRUNCATED FIRST MID TERMINATED
    results = [assembler.add(step) for step in steps]
    assert [result.terminated.tolist() for result in results if result is not None] == [
        [],
        [False],
        [False],
        [],
        [False],
        [True],
    ]


def test_a_restored_learner_counts_the_steps_it_missed() -> None:
    """Before its restart, the learner received Steps 0 to 9. It misses 10 and 11, so Step 12 gives no transition."""
    steps = history([[(100, True)]], 20, 4)
    before = Assembler()
    for step in steps[:10]:
        before.add(step)
    assembler = Assembler.restored(json.loads(json.dumps(before.state())))
    first = assembler.add(steps[12])
    assert first is not None
    assert len(first) == 0
    assert (assembler.counters["missed"], assembler.counters["gaps"]) == (2, 1)
    second = assembler.add(steps[13])
    assert second is not None
    assert second.observation[0].tolist() == [4, 0, 0, 12]


def test_a_restored_learner_continues_the_episode() -> None:
    """Before its restart, the learner received Steps 0 to 9. The source repeats Steps 8 and 9.

    The episode's return is 1 + … + 12 = 78.
    """
    steps = history([[(12, True)]], 20, 4)
    before = Assembler()
    for step in steps[:10]:
        before.add(step)
    assembler = Assembler.restored(json.loads(json.dumps(before.state())))
    assert assembler.add(steps[8]) is None
    assert assembler.add(steps[9]) is None
    joined = [assembler.add(step) for step in steps[10:13]]
    assert [item.observation[0].tolist() for item in joined if item] == [[4, 0, 0, 9], [4, 0, 0, 10], [4, 0, 0, 11]]
    assert joined[-1] is not None
    assert joined[-1].ended == [(78.0, 12)]
    assert assembler.counters["missed"] == assembler.counters["gaps"] == assembler.counters["cut"] == 0


def test_a_restarted_source_cuts_its_running_episodes(make_step: Callable[..., Step]) -> None:
    assembler = Assembler()
    for sequence in range(3):
        assembler.add(make_step(sequence, 2))
    assembler.add(make_step(0, 2, incarnation=1))
    assert assembler.counters["cut"] == 2
    assert assembler.counters["missed"] == 0


@pytest.mark.parametrize("sequence", [0, 1])
def test_late_steps_are_counted(make_step: Callable[..., Step], sequence: int) -> None:
    assembler = Assembler()
    for number in range(4):
        assembler.add(make_step(number))
    assert assembler.add(make_step(sequence)) is None
    assert assembler.counters["late"] == 1
