"""Compares the replay buffer with a list under random operations, and tests the buffer's samples and state."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from td3_robot.learner.replay_buffer.buffer import Batch, ReplayBuffer
from td3_robot.learner.replay_buffer.storage import row_size

O, A = 3, 2  # noqa: E741 - observation and action size, as in the docstrings


def transitions(first: int, count: int) -> tuple[Any, ...]:
    """Arguments of ``add``. In transition i, every value except the discount is i plus a fraction.

    Every third transition has discount 0. The others have 0.5.
    """
    i = np.arange(first, first + count, dtype=np.float32)
    observation = i[:, None] + np.array([0.125, 0.25, 0.375], np.float32)
    action = i[:, None] + np.array([0.5, 0.625], np.float32)
    return (
        observation,
        action,
        i + np.float32(0.75),
        observation + np.float32(0.03125),
        np.where(i % 3 == 0, 0, 0.5).astype(np.float32),
    )


def rows_of(batch: Batch) -> np.ndarray[Any, Any]:
    """[B, O + A + 1 + O + 1]: observation, action, reward, next observation, discount."""
    return np.hstack([tensor.numpy() for tensor in batch])


def expected_row(i: int) -> list[float]:
    o = [i + 0.125, i + 0.25, i + 0.375]
    return [*o, i + 0.5, i + 0.625, i + 0.75, *(x + 0.03125 for x in o), 0.5 * (i % 3 != 0)]


@settings(deadline=None, max_examples=150)
@given(capacity=st.integers(1, 12), counts=st.lists(st.integers(0, 30), max_size=12), seed=st.integers(0, 2**32 - 1))
def test_the_buffer_holds_the_same_rows_as_a_list(capacity: int, counts: list[int], seed: int) -> None:
    buffer = ReplayBuffer(capacity, O, A, seed)
    model: deque[int] = deque(maxlen=capacity)
    total = 0
    for count in counts:
        buffer.add(*transitions(total, count))
        model.extend(range(total, total + count))
        total += count
        assert len(buffer) == len(model)
        assert buffer.total_added == total
        stored = buffer.state()[0]["rows"]
        assert sorted(stored[:, 0]) == [i + 0.125 for i in model]
        if model:
            found = {tuple(row) for row in rows_of(buffer.sample(8 * capacity))}
            assert found <= {tuple(expected_row(i)) for i in model}


@settings(deadline=None, max_examples=80)
@given(
    capacity=st.integers(1, 12),
    before=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    after=st.lists(st.integers(0, 30), max_size=5),
    samples=st.integers(0, 5),
)
def test_a_restored_buffer_continues_bit_exactly(
    capacity: int, before: list[int], after: list[int], samples: int
) -> None:
    buffer, total = ReplayBuffer(capacity, O, A, seed=1), 0
    for count in before:
        buffer.add(*transitions(total, count))
        total += count
    for size in range(samples):
        buffer.sample(2 * size + 1)
    arrays, scalars = buffer.state()
    resumed = ReplayBuffer(capacity, O, A, seed=2)
    resumed.add(*transitions(1000, capacity))  # the restore must discard them
    resumed.restore(arrays, json.loads(json.dumps(scalars)))
    for count in [0, *after]:
        for each in (buffer, resumed):
            each.add(*transitions(total, count))
        total += count
        assert len(resumed) == len(buffer)
        assert resumed.total_added == buffer.total_added
        assert rows_of(resumed.sample(9)).tobytes() == rows_of(buffer.sample(9)).tobytes()
    assert resumed.state()[0]["rows"].tobytes() == buffer.state()[0]["rows"].tobytes()
    assert resumed.state()[1] == buffer.state()[1]


def test_new_rows_replace_the_oldest() -> None:
    # The capacity is 5. The first five transitions fill the buffer. The next two replace transitions 0 and 1. Then
    # transitions 7 to 18 follow. Only the last five of them stay: 14 to 18.
    buffer = ReplayBuffer(5, O, A, seed=0)
    for first, count, left in ((0, 5, range(5)), (5, 2, range(2, 7)), (7, 12, range(14, 19))):
        buffer.add(*transitions(first, count))
        assert sorted(buffer.state()[0]["rows"][:, 0]) == [i + 0.125 for i in left]
    assert (len(buffer), buffer.total_added) == (5, 19)
    buffer.add(*transitions(19, 1))  # 19 replaces 14, the oldest transition
    assert sorted(buffer.state()[0]["rows"][:, 0]) == [i + 0.125 for i in range(15, 20)]


@pytest.mark.parametrize("added", [40, 64, 150], ids=["partly filled", "full", "wrapped"])
def test_samples_are_uniform(added: int) -> None:
    seed = 5
    print(f"seed {seed}")
    buffer = ReplayBuffer(64, O, A, seed)
    buffer.add(*transitions(0, added))
    stored = min(added, 64)
    draws = 64_000
    drawn = np.concatenate([buffer.sample(1000).observation[:, 0].numpy() for _ in range(draws // 1000)])
    values, counts = np.unique(drawn, return_counts=True)
    assert list(values) == [i + 0.125 for i in range(added - stored, added)]
    # Each of n values should occur draws/n times. Pearson's sum has n - 1 degrees of freedom, so its mean is n - 1 and
    # its variance is 2 (n - 1). The limit is five standard deviations above the mean. With uniform samples, fewer
    # than one seed in 10^4 would fail. This seed is fixed.
    chi_squared = float(((counts - draws / stored) ** 2 / (draws / stored)).sum())
    assert chi_squared < (stored - 1) + 5 * np.sqrt(2 * (stored - 1))


def test_a_batch_has_the_documented_shapes_and_separate_memory() -> None:
    buffer = ReplayBuffer(10, O, A, seed=0)
    buffer.add(*transitions(0, 4))
    batch = buffer.sample(7)
    shapes = {name: tuple(tensor.shape) for name, tensor in batch._asdict().items()}
    assert shapes == {
        "observation": (7, O),
        "action": (7, A),
        "reward": (7, 1),
        "next_observation": (7, O),
        "discount": (7, 1),
    }
    assert all(tensor.dtype == torch.float32 for tensor in batch)
    before = rows_of(batch).copy()
    buffer.add(*transitions(100, 10))
    buffer.sample(7)
    assert np.array_equal(rows_of(batch), before)  # a batch does not share memory with the buffer


def test_the_seed_determines_the_samples() -> None:
    def run(seed: int, of_global_generator: int) -> bytes:
        np.random.seed(of_global_generator)  # noqa: NPY002 - the global generator must not matter
        buffer = ReplayBuffer(100, O, A, seed)
        buffer.add(*transitions(0, 100))
        return rows_of(buffer.sample(50)).tobytes()

    assert run(1, 3) == run(1, 4)
    assert run(1, 3) != run(2, 3)


def test_a_row_has_the_expected_size() -> None:
    # A row is 3 + 2 + 1 + 1 + 3 = 10 numbers of 4 bytes.
    assert 4 * 1000 * row_size(3, 2) == 40_000
    buffer = ReplayBuffer(1000, 3, 2, seed=0)
    buffer.add(*transitions(0, 1000))
    assert buffer.state()[0]["rows"].nbytes == 40_000


def test_invalid_arguments_are_refused() -> None:
    buffer = ReplayBuffer(10, O, A, seed=0)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1)
    good = transitions(0, 4)
    for position, name in enumerate(("observation", "action", "reward", "next_observation", "discount")):
        wrong = list(good)
        wrong[position] = wrong[position][:3]
        with pytest.raises(ValueError, match="expected"):
            buffer.add(*wrong)
        assert len(buffer) == 0, name
