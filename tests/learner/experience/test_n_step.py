"""Compares n-step returns with hand calculations and with a slow reference implementation.

The Steps include episode ends, gaps and restarts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.learner.experience.n_step import NStep, Rows
from td3_robot.learner.experience.transitions import Assembler
from td3_robot.messages import Phase, Step
from tests.learner.experience.test_transitions import ends, history


def rows_of(rows: Rows) -> list[tuple[Any, ...]]:
    """Return (incarnation, robot, episode, first step, last step, return R, factor) for each row.

    The first five numbers come from the observations of ``history``.
    """
    return [
        (*map(int, o), int(o2[3]), float(r), float(d))
        for o, r, o2, d in zip(rows.observation, rows.reward, rows.next_observation, rows.discount, strict=True)
    ]


def run(steps: int, discount: float, stream: list[Step]) -> list[list[tuple[Any, ...]]]:
    """Return the rows that each Step completes."""
    assembler, returns = Assembler(), NStep(steps, discount, 4, 2)
    result = []
    for step in stream:
        transitions = assembler.add(step)
        result.append([] if transitions is None else rows_of(returns.add("s", transitions, step)))
    return result


@pytest.mark.parametrize("terminates", [True, False])
def test_returns_match_a_hand_calculation(terminates: bool) -> None:
    """The rewards are 1, 2, 3 and 4. Then the episode ends. n is 3, and γ is 1/2.

    The third reward completes the row from step 0: R = 1 + 2/2 + 3/4 = 2.75, with factor 1/8. The fourth reward
    completes three rows. From step 1: R = 2 + 3/2 + 4/4 = 4.5, with factor 1/8. From step 2: R = 3 + 4/2 = 5, with
    factor 1/4. From step 3: R = 4, with factor 1/2. If the episode terminates, these three factors are 0.
    """
    on = 0 if terminates else 1
    expected = [
        [],
        [],
        [],
        [(0, 0, 0, 0, 3, 2.75, 0.125)],
        [(0, 0, 0, 1, 4, 4.5, 0.125 * on), (0, 0, 0, 2, 4, 5.0, 0.25 * on), (0, 0, 0, 3, 4, 4.0, 0.5 * on)],
        [],
        [],
        [],
        [(0, 0, 1, 0, 3, 2.75, 0.125)],
    ]
    assert run(3, 0.5, history([[(4, terminates)]], 9, 0)) == expected


def test_a_gap_ends_rows_but_does_not_count_as_a_termination() -> None:
    """Step 3 of a long episode is lost.

    The row from step 0 has R = 1 + 2/2 = 2 and factor 1/4. The row from step 1 has R = 2 and factor 1/2.
    """
    stream = history([[(100, True)]], 8, 0)
    found = run(3, 0.5, [step for step in stream if step.sequence != 3])
    # The Steps are 0 1 2 (gap) 4 5 6 7. The transition from 4 to 5 shows the gap, so Step 5 completes two rows.
    assert found[:4] == [[], [], [], []]
    assert found[4] == [(0, 0, 0, 0, 2, 2.0, 0.25), (0, 0, 0, 1, 2, 2.0, 0.5)]
    assert found[5] == []
    assert found[6] == [(0, 0, 0, 4, 7, 5 + 6 / 2 + 7 / 4, 0.125)]


def test_incomplete_rows_are_returned_at_the_end_of_a_recording() -> None:
    """The recording has Steps 0 to 2 of a long episode. The rows are the same as for the gap in the test above."""
    assembler, returns = Assembler(), NStep(3, 0.5, 4, 2)
    for step in history([[(100, True)]], 3, 0):
        if transitions := assembler.add(step):
            assert rows_of(returns.add("s", transitions, step)) == []
    assert rows_of(returns.end()) == [(0, 0, 0, 0, 2, 2.0, 0.25), (0, 0, 0, 1, 2, 2.0, 0.5)]
    assert rows_of(returns.end()) == []


@given(
    data=st.data(),
    robots=ends,
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    n=st.integers(1, 5),
)
def test_rows_equal_the_rows_of_a_slow_reference_implementation(
    data: st.DataObject, robots: Any, lengths: list[int], n: int
) -> None:
    """Each transition gives one row of up to n consecutive transitions.

    When the Steps end, the newest transitions still wait for the rest of their rows.
    """
    stream = [step for number, length in enumerate(lengths) for step in history(robots, length, number)]
    kept = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(stream), max_size=len(stream)))
    received = [step for step, keep in zip(stream, kept, strict=True) if keep]
    found = [row for rows in run(n, 0.5, received) for row in rows]

    expected, waiting = [], 0
    for robot in range(len(robots)):
        chains: list[list[Step]] = []  # lists of consecutive Steps; k + 1 Steps are k transitions
        for before, after in itertools.pairwise(received):
            follows = (after.incarnation, after.sequence) == (before.incarnation, before.sequence + 1)
            if follows and after.phase[robot] != Phase.FIRST:
                if chains and chains[-1][-1] is before:
                    chains[-1].append(after)
                else:
                    chains.append([before, after])
        for index, chain in enumerate(chains):
            over = chain[-1].phase[robot] >= Phase.TERMINATED
            restarted = received[-1].incarnation != chain[-1].incarnation
            closed = over or restarted or index < len(chains) - 1
            for start in range(len(chain) - 1):
                m = min(n, len(chain) - 1 - start)
                if m < n and not closed:
                    waiting += 1
                    continue
                end = chain[start + m]
                reward = sum(0.5**k * float(chain[start + 1 + k].reward[robot]) for k in range(m))
                factor = 0.0 if end.phase[robot] == Phase.TERMINATED else 0.5**m
                first = chain[start]
                who = first.incarnation, robot, int(first.episode[robot])
                expected.append((*who, int(first.episode_step[robot]), int(end.episode_step[robot]), reward, factor))
    assert sorted(found) == sorted(expected)
    assert waiting <= (n - 1) * len(robots)


def test_n_step_returns_continue_bit_exactly_after_a_restore() -> None:
    """The test saves and restores the state after each Step except the last.

    After each restore, the source first repeats its newest Step.
    """
    stream = history([[(3, True), (5, False)], [(4, False)]], 20, 7)
    through = run(3, 0.9, stream)
    for cut in range(1, len(stream)):
        assembler, returns = Assembler(), NStep(3, 0.9, 4, 2)
        for step in stream[:cut]:
            transitions = assembler.add(step)
            assert transitions is not None
            returns.add("s", transitions, step)
        arrays, scalars = returns.state()
        resumed = NStep(3, 0.9, 4, 2)
        resumed.restore(arrays, json.loads(json.dumps(scalars)))
        back = Assembler.restored(json.loads(json.dumps(assembler.state())))
        assert back.add(stream[cut - 1]) is None  # the repeated Step
        found = []
        for step in stream[cut:]:
            transitions = back.add(step)
            assert transitions is not None
            found.append(rows_of(resumed.add("s", transitions, step)))
        assert found == through[cut:]


def test_sources_are_separate() -> None:
    a, b = history([[(9, True)]], 5, 0), history([[(9, True)]], 5, 0)
    assemblers, returns = {"a": Assembler(), "a/b": Assembler()}, NStep(2, 0.5, 4, 2)
    found = []
    for pair in zip(a, b, strict=True):
        for name, step in zip(assemblers, pair, strict=True):
            transitions = assemblers[name].add(step)
            assert transitions is not None
            found.append(len(returns.add(name, transitions, step).reward))
    assert found == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_with_n_1_each_row_is_a_transition(make_step: Callable[..., Step]) -> None:
    """Bit for bit, R is the reward and the factor is γ."""
    assembler, returns = Assembler(), NStep(1, 0.99, 3, 2)
    steps = [make_step(n, reward=np.array([0.1 * n], np.float32)) for n in range(3)]
    for step in steps:
        transitions = assembler.add(step)
        assert transitions is not None
        rows = returns.add("sim-0", transitions, step)
        assert np.array_equal(rows.reward, transitions.reward)
        assert rows.discount.tolist() == [np.float32(0.99)] * len(transitions)
