"""Exploration noise: a function of who and when, and nothing else."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.messages import NoiseKind
from td3_robot.policy.noise import Noise

GAUSSIAN, UNIFORM = NoiseKind.GAUSSIAN, NoiseKind.UNIFORM


def ask(noise: Noise, kind: NoiseKind, episode: list[int], step: list[int]) -> np.ndarray:
    return noise(kind, np.array(episode, np.uint64), np.array(step, np.uint32)).copy()


@given(
    seed=st.integers(0, 2**64 - 1),
    moments=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_order_of_requests_does_not_matter(seed: int, moments: list[tuple[int, int]], order: object) -> None:
    forward = Noise(seed, "sim-0", 0, 1, 3)
    first = {moment: ask(forward, GAUSSIAN, [moment[0]], [moment[1]]) for moment in moments}
    shuffled = list(moments)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = Noise(seed, "sim-0", 0, 1, 3)
    for episode, step in shuffled:
        ask(again, UNIFORM, [episode], [step])  # what is asked in between does not matter either
        assert np.array_equal(ask(again, GAUSSIAN, [episode], [step]), first[episode, step])


def test_robots_step_at_their_own_pace(seed: int) -> None:
    """A robot's noise is the same whatever the others do: robot 1 is asked for (2, 70) beside different company."""
    noise = Noise(seed, "sim-0", 0, 3, 2)
    together = ask(noise, GAUSSIAN, [0, 2, 9], [5, 70, 200])
    apart = ask(Noise(seed, "sim-0", 0, 3, 2), GAUSSIAN, [4, 2, 1], [64, 70, 63])
    assert np.array_equal(together[1], apart[1])
    assert not np.array_equal(together[0], apart[0])


def test_everything_in_the_identity_matters(seed: int) -> None:
    base: dict[str, Any] = {"seed": seed, "source": "sim-0", "incarnation": 0, "robots": 2, "actions": 4}
    reference = ask(Noise(**base), GAUSSIAN, [1, 1], [10, 10])
    assert not np.array_equal(reference[0], reference[1])  # robots differ
    for change in ({"seed": seed ^ 1}, {"source": "sim-1"}, {"incarnation": 1}):
        assert not np.array_equal(ask(Noise(**{**base, **change}), GAUSSIAN, [1, 1], [10, 10]), reference), change
    noise = Noise(**base)
    assert not np.array_equal(ask(noise, GAUSSIAN, [2, 2], [10, 10]), reference)
    assert not np.array_equal(ask(noise, GAUSSIAN, [1, 1], [11, 11]), reference)
    assert np.array_equal(ask(noise, GAUSSIAN, [1, 1], [10, 10]), reference)


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
