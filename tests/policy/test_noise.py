"""Exploration noise: a function of who and when, and nothing else."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.messages import NoiseKind
from td3_robot.policy.noise import Noise, blocks_remembered

GAUSSIAN, UNIFORM, OU = NoiseKind.GAUSSIAN, NoiseKind.UNIFORM, NoiseKind.ORNSTEIN_UHLENBECK


def ask(noise: Noise, kind: NoiseKind, episode: list[int], step: list[int], theta: float = 0.15) -> np.ndarray:
    return noise(kind, np.array(episode, np.uint64), np.array(step, np.uint32), theta).copy()


@given(
    kind=st.sampled_from([GAUSSIAN, OU]),
    seed=st.integers(0, 2**64 - 1),
    moments=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_order_of_requests_does_not_matter(
    kind: NoiseKind, seed: int, moments: list[tuple[int, int]], order: object
) -> None:
    forward = Noise(seed, "sim-0", 0, 1, 3)
    first = {moment: ask(forward, kind, [moment[0]], [moment[1]]) for moment in moments}
    shuffled = list(moments)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = Noise(seed, "sim-0", 0, 1, 3)
    for episode, step in shuffled:
        ask(again, UNIFORM, [episode], [step])  # what is asked in between does not matter either
        ask(again, OU, [episode], [step], 0.5)
        assert np.array_equal(ask(again, kind, [episode], [step]), first[episode, step])


@pytest.mark.parametrize("kind", [GAUSSIAN, OU])
def test_robots_step_at_their_own_pace(kind: NoiseKind, seed: int) -> None:
    """A robot's noise is the same whatever the others do: robot 1 is asked for (2, 70) beside different company."""
    noise = Noise(seed, "sim-0", 0, 3, 2)
    together = ask(noise, kind, [0, 2, 9], [5, 70, 200])
    apart = ask(Noise(seed, "sim-0", 0, 3, 2), kind, [4, 2, 1], [64, 70, 63])
    assert np.array_equal(together[1], apart[1])
    assert not np.array_equal(together[0], apart[0])


@pytest.mark.parametrize("kind", [GAUSSIAN, OU])
def test_everything_in_the_identity_matters(kind: NoiseKind, seed: int) -> None:
    base: dict[str, Any] = {"seed": seed, "source": "sim-0", "incarnation": 0, "robots": 2, "actions": 4}
    reference = ask(Noise(**base), kind, [1, 1], [10, 10])
    assert not np.array_equal(reference[0], reference[1])  # robots differ
    for change in ({"seed": seed ^ 1}, {"source": "sim-1"}, {"incarnation": 1}):
        assert not np.array_equal(ask(Noise(**{**base, **change}), kind, [1, 1], [10, 10]), reference), change
    noise = Noise(**base)
    assert not np.array_equal(ask(noise, kind, [2, 2], [10, 10]), reference)
    assert not np.array_equal(ask(noise, kind, [1, 1], [11, 11]), reference)
    assert np.array_equal(ask(noise, kind, [1, 1], [10, 10]), reference)


def test_distributions() -> None:
    """10,000 draws (a fixed seed): means within four standard errors, 4 · 1/√10⁴ = 0.04 and 4 · 0.289/√10⁴ = 0.012."""
    noise = Noise(1, "sim-0", 0, 1, 10)
    normal = np.concatenate([ask(noise, GAUSSIAN, [0], [step]) for step in range(1000)])
    uniform = np.concatenate([ask(noise, UNIFORM, [0], [step]) for step in range(1000)])
    assert abs(normal.mean()) < 0.04
    assert abs(normal.std() - 1) < 0.04
    assert abs(uniform.mean() - 0.5) < 0.012
    assert 0 <= uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1
    assert abs(np.corrcoef(normal[:-1, 0], normal[1:, 0])[0, 1]) < 0.13  # 4/√999: steps are independent


def test_pinned_values() -> None:
    """The stream is part of the protocol: a recorded action must be computable by a later version."""
    drawn = ask(Noise(42, "sim-0", 0, 1, 2), GAUSSIAN, [3], [65])
    generator = np.random.Generator(
        np.random.Philox(
            key=np.random.SeedSequence([42, zlib.crc32(b"sim-0"), 0]).generate_state(2, np.uint64),
            counter=np.array([0, 1, 1, 3], np.uint64),  # block 65 // 64 = 1 of episode 3, kind Gaussian = 1
        )
    )
    assert np.array_equal(drawn[0], generator.standard_normal((64, 2), np.float32)[1])  # 65 % 64 = 1


def independent(noise: Noise, steps: int) -> np.ndarray:
    """The numbers ε(0), ε(1), … that drive the Ornstein-Uhlenbeck process: with θ = 1 it remembers nothing."""
    return np.concatenate([ask(noise, OU, [4], [step], 1.0) for step in range(steps)])


@pytest.mark.parametrize("theta", [0.15, 0.5])
def test_ornstein_uhlenbeck_by_its_sum(theta: float, seed: int) -> None:
    """x(t) is the sum of (1 - θ)^k ε(t - k) over all k; with θ = 1 x is ε. float32 resolves 6e-8 of it.

    What is left out weighs at most (1 - θ)^(64 · 2) = 9e-10 each for θ = 0.15.
    """
    noise = Noise(seed, "sim-0", 0, 1, 3)
    driving = independent(noise, 400).astype(np.float64)
    assert abs(driving.std() - 1) < 0.15
    for step in (0, 1, 63, 64, 65, 191, 192, 399):
        expected = sum((1 - theta) ** k * driving[step - k] for k in range(step + 1))
        np.testing.assert_allclose(ask(noise, OU, [4], [step], theta)[0], expected, rtol=2e-7, atol=1e-6)


def test_ornstein_uhlenbeck_remembers_enough_and_not_too_much() -> None:
    """(1 - θ)^(64 n) <= 2^-24: 0.85^64 = 3e-5, 0.85^128 = 9e-10; 0.99^64 = e^-0.6432, n = 24 ln 2 / 0.6432 = 25.9."""
    assert blocks_remembered(0.15) == 2
    assert blocks_remembered(0.01) == 26
    assert blocks_remembered(1.0) == 1
    assert blocks_remembered(0.5) == 1


def test_ornstein_uhlenbeck_spreads_as_it_should() -> None:
    """The variance goes to 1 / (1 - 0.85²) = 3.6036, a deviation of 1.898; neighbours correlate by 0.85.

    4,000 steps of 10 actions (a fixed seed) are worth about 4000 · 0.15 · 10 / 2 = 3000 independent ones: within 4 %.
    """
    noise = Noise(1, "sim-0", 0, 1, 10)
    x = np.concatenate([ask(noise, OU, [0], [step]) for step in range(4000)])[200:]
    assert abs(x.std() / 1.898 - 1) < 0.04
    assert abs(np.mean(x[1:] * x[:-1]) / np.mean(x * x) - 0.85) < 0.01


def test_scales_of_robots_by_hand() -> None:
    """crc32("a") = 0xE8B7BE43, 0.90905 of 2^32: robots 0 to 3 of 4 stand at (i + 0.90905) / 4 between 0.1 and 0.5."""
    scales = Noise(0, "a", 0, 4, 2).scales((0.1, 0.5))
    assert scales.shape == (4, 1)
    np.testing.assert_allclose(scales[:, 0], [0.190905, 0.290905, 0.390905, 0.490905], atol=1e-5)
    assert Noise(0, "a", 0, 2, 2).scales(0.1).tolist() == [[np.float32(0.1)], [np.float32(0.1)]]
    alone = [float(Noise(0, f"sim-{i}", 0, 1, 2).scales((0.0, 1.0))[0, 0]) for i in range(20)]
    assert len(set(alone)) == 20
    assert max(alone) - min(alone) > 0.5
