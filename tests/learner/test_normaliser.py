"""The running mean and standard deviation equal hand calculations and numpy, and continue from a saved state."""

from __future__ import annotations

import json

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.bundle import OBSERVATION_CLIP
from td3_robot.learner.normaliser import Normaliser
from td3_robot.learner.replay_buffer.buffer import Batch


def test_statistics_match_a_hand_calculation() -> None:
    """Values 1, 3 and 8 have mean 4 and variance (9 + 1 + 16) / 3. A constant channel gets the divisor 1e-4, not 0."""
    normaliser = Normaliser(2)
    assert {name: array.tolist() for name, array in normaliser.tensors().items()} == {
        "observation.mean": [0, 0],
        "observation.std": [1, 1],
    }
    normaliser.add(np.array([[1, 7]], np.float32))
    normaliser.add(np.zeros((0, 2), np.float32))
    normaliser.add(np.array([[3, 7], [8, 7]], np.float32))
    tensors = normaliser.tensors()
    assert tensors["observation.mean"].tolist() == [4, 7]
    assert tensors["observation.std"].tolist() == [np.float32(np.sqrt(26 / 3)), np.float32(1e-4)]


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=10), seed=st.integers(0, 2**32 - 1))
def test_statistics_equal_those_of_numpy(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    everything = (random.normal(size=(sum(sizes) + 1, 3)) * [1, 100, 0.01] + [1e4, 0, 5]).astype(np.float32)
    normaliser = Normaliser(3)
    normaliser.add(everything[:1])
    start = 1
    for size in sizes:
        normaliser.add(everything[start : start + size])
        start += size
    tensors = normaliser.tensors()
    exact = everything.astype(np.float64)
    # numpy and the normaliser compute in float64. Rounding to float32 changes a result by up to 6e-8 of its value.
    np.testing.assert_allclose(tensors["observation.mean"], exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(tensors["observation.std"], np.maximum(exact.std(0), 1e-4), rtol=1e-6)


def test_a_batch_is_normalised_as_on_the_policy_server(rng: np.random.Generator) -> None:
    """The results are bit-exact: torch and numpy both subtract, divide and clip in float32."""
    normaliser = Normaliser(5)
    normaliser.add((rng.normal(size=(100, 5)) * [1, 10, 0.1, 1e-6, 3] + [0, 5, -2, 1, 100]).astype(np.float32))
    observations = (rng.normal(size=(4096, 5)) * 30).astype(np.float32)
    block = torch.from_numpy(np.hstack([observations, observations[::-1]]))
    column = torch.zeros(4096, 1)
    batch = normaliser(Batch(block[:, :5], column, column, block[:, 5:], column))
    mean, std = normaliser.tensors().values()
    expected = np.clip((observations - mean) / std, -OBSERVATION_CLIP, OBSERVATION_CLIP)
    assert expected.dtype == np.float32
    assert batch.observation.numpy().tobytes() == expected.tobytes()
    assert np.array_equal(batch.next_observation.numpy(), expected[::-1])
    assert (np.abs(expected) < OBSERVATION_CLIP).any()
    assert (np.abs(expected) == OBSERVATION_CLIP).any()
    assert np.array_equal(block[:, :5].numpy(), observations)  # the caller's rows are unchanged


def test_a_restored_normaliser_continues_bit_exactly(rng: np.random.Generator) -> None:
    one, other = Normaliser(3), Normaliser(3)
    one.add(rng.normal(size=(7, 3)).astype(np.float32))
    arrays, scalars = one.state()
    other.restore(arrays, json.loads(json.dumps(scalars)))
    more = rng.normal(size=(4, 3)).astype(np.float32)
    for item in (one, other):
        item.add(more)
    assert all(np.array_equal(one.tensors()[name], array) for name, array in other.tensors().items())
    assert all(np.array_equal(one.state()[0][name], array) for name, array in other.state()[0].items())
