"""Tests loss-adjusted prioritised replay (LAP): its sum tree, its saved state and its priorities.

The priorities are compared with hand calculations and with a float64 reference.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.replay_buffer.prioritised import PrioritisedReplay, SumTree
from tests.learner.replay_buffer.test_buffer import transitions
from tests.learner.td3_cases import Exact

O, A = 3, 2  # noqa: E741 - observation and action size, as in the docstrings


def errors(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=2000),  # above 1024 weights, the tree has two levels
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1000)), max_size=20),
    parts=st.lists(st.integers(0, 10**6 - 1), min_size=1, max_size=20),
)
def test_the_tree_finds_the_same_leaf_as_a_cumulative_sum(
    weights: list[int], changes: list[tuple[int, int]], parts: list[int]
) -> None:
    """Sums of whole numbers have no rounding errors. The tree finds leaf k if sum(w[:k]) <= part < sum(w[:k + 1])."""
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), np.array(weights, np.float64))
    for place, weight in changes:
        weights[place % len(weights)] = weight
        tree.set(np.array([place % len(weights)]), float(weight))
    total = sum(weights)
    if total:
        wanted = [part % total for part in parts]
        found = tree.find((np.array(wanted) + 0.5) / total)  # rounding errors below 0.5 cannot change the leaf
        assert found.tolist() == np.searchsorted(np.cumsum(weights), wanted, side="right").tolist()


def test_priorities_match_a_hand_calculation() -> None:
    """The exponent α is 1/2. New rows get the greatest priority so far, which is 1 at first.

    First there is one critic. Its TD errors δ of the two rows have |δ| = 0.3 and 4. |δ| counts as at least 1, so the
    priorities are √1 = 1 and √4 = 2. Then a second critic has |δ| = 9 and 1.5. In each row, the larger |δ| counts, so
    the priorities are √9 = 3 and √4 = 2.
    """
    buffer = PrioritisedReplay(4, O, A, seed=1, exponent=0.5)
    buffer.add(*transitions(0, 2))
    assert buffer.priorities.tolist() == [1.0, 1.0]
    buffer._drawn = np.array([0, 1])
    buffer.learned([errors(0.3, -4.0)])
    assert buffer.priorities.tolist() == [1.0, 2.0]
    buffer.learned([errors(0.3, -4.0), errors(-9.0, 1.5)])
    assert buffer.priorities.tolist() == [3.0, 2.0]
    buffer.add(*transitions(2, 3))  # two new rows, and one that replaces row 0; the greatest priority is 3
    assert buffer.priorities.tolist() == [3.0, 2.0, 3.0, 3.0]
    buffer.learned([errors(float("nan"), float("inf"))])  # training diverges; |δ| counts as at most 1e12
    assert buffer.priorities.tolist() == [1.0, 1e6, 3.0, 3.0]
    assert torch.isfinite(buffer.sample(64).observation).all()


def test_rows_are_drawn_in_proportion_to_their_priorities() -> None:
    """The priorities are 1, 3, 2 and 2, so the rows get 1/8, 3/8, 1/4 and 1/4 of 8,000 draws.

    The tolerance is four standard errors. The standard error of a share p is sqrt(p (1 - p) / 8000), at most 0.0055.
    """
    buffer = PrioritisedReplay(4, O, A, seed=3, exponent=1.0)
    buffer.add(*transitions(0, 4))
    buffer._drawn = np.arange(4)
    buffer.learned([errors(1.0, 3.0, 2.0, 2.0)])
    drawn = buffer.sample(8000).observation[:, 0].numpy() - np.float32(0.125)
    shares = np.bincount(drawn.astype(int), minlength=4) / 8000
    np.testing.assert_allclose(shares, [0.125, 0.375, 0.25, 0.25], atol=0.022)


def test_unfilled_rows_are_never_drawn() -> None:
    buffer = PrioritisedReplay(1000, O, A, seed=4, exponent=0.4)
    buffer.add(*transitions(1, 7))
    assert buffer.sample(20_000).observation[:, 0].min() >= 1
    buffer._tree.find = lambda fractions: np.full(len(fractions), 999)  # type: ignore[method-assign]
    assert (buffer.sample(3).observation[:, 0] == 7.125).all()  # the last filled row, not an unfilled one


def test_priorities_equal_the_priorities_of_the_float64_reference() -> None:
    config = LearnerConfig(critic_loss="huber", replay="lap", learning_rate=1e-3)
    td3 = FastTD3(O, A, (8,), config, seed=5)
    exact = Exact(td3)
    buffer = PrioritisedReplay(50, O, A, seed=6, exponent=0.4)
    random = np.random.default_rng(7)
    observation, following = (random.normal(size=(50, O)).astype(np.float32) for _ in range(2))
    reward = (3 * random.normal(size=50)).astype(np.float32)
    action = random.uniform(-1, 1, (50, A)).astype(np.float32)
    buffer.add(observation, action, reward, following, np.full(50, 0.9, np.float32))
    expected = np.ones(50)
    for _ in range(5):
        batch = buffer.sample(16)
        buffer.learned(td3.learn(batch))
        found = torch.cat(exact.learn(batch), 1).abs().amax(1).numpy()
        expected[buffer._drawn] = np.maximum(found, 1) ** 0.4
    assert expected.max() > 1.2
    np.testing.assert_allclose(buffer.priorities, expected, rtol=1e-4)


@pytest.mark.parametrize("capacity", [5, 40, 1500])
def test_a_restored_buffer_continues_bit_exactly(capacity: int) -> None:
    buffer = PrioritisedReplay(capacity, O, A, seed=8, exponent=0.4)
    random = np.random.default_rng(9)

    def work(item: PrioritisedReplay, size: torch.Tensor) -> bytes:
        batch = item.sample(16)
        item.learned([size])
        return bytes(np.hstack([tensor.numpy() for tensor in batch]).tobytes())

    buffer.add(*transitions(0, 33))
    for _ in range(10):
        work(buffer, torch.from_numpy(random.exponential(3, (16, 1)).astype(np.float32)))
    arrays, scalars = buffer.state()
    arrays = {name: array.copy() for name, array in arrays.items()}
    resumed = PrioritisedReplay(capacity, O, A, seed=10, exponent=0.4)
    resumed.add(*transitions(1000, capacity))  # the restore must discard them
    resumed.restore(arrays, json.loads(json.dumps(scalars)))
    for count in range(10):
        size = torch.from_numpy(random.exponential(3, (16, 1)).astype(np.float32))
        assert work(buffer, size) == work(resumed, size)
        for item in (buffer, resumed):
            item.add(*transitions(100 + count, 2))
    assert buffer.priorities.tobytes() == resumed.priorities.tobytes()
