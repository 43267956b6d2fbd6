"""Tests of the rules that decide whether training has diverged."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from td3_robot.learner.divergence import Divergence

SOUND = {"critic_loss": 1.0, "q_target_size": 3.0, "actor_gradient_norm": 0.0}


def test_the_bound_matches_a_hand_calculation() -> None:
    """The bound is 100 times the largest possible return. With γ = 0.9, rewards up to 7 give returns up to 70.

    Before the first reward, the largest reward counts as 1, so the bound is 1000.
    """
    divergence = Divergence(0.9)
    assert divergence.bound == pytest.approx(1000)
    divergence.add(np.array([0.5, -7.0, 2.0], np.float32))
    divergence.add(np.zeros(0, np.float32))
    assert divergence.bound == pytest.approx(7000)
    assert divergence.problem({**SOUND, "q_target_size": 6999.0}) is None
    problem = divergence.problem({**SOUND, "q_target_size": 7001.0})
    assert problem is not None
    assert "exploded: q_target_size is 7e+03, above 7e+03" in problem
    assert "100 times the largest possible return with rewards up to 7" in problem


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", list(SOUND))
def test_non_finite_numbers_are_a_divergence(name: str, value: float) -> None:
    problem = Divergence(0.99).problem({**SOUND, name: value})
    assert problem == f"{name} is {value}: networks hold numbers that are not finite"


def test_with_discount_1_there_is_no_bound() -> None:
    assert Divergence(1.0).problem({**SOUND, "q_target_size": 1e30}) is None


def test_the_state_restores_the_bound() -> None:
    one, other = Divergence(0.9), Divergence(0.9)
    one.add(np.array([-3.5], np.float32))
    arrays, scalars = one.state()
    other.restore(arrays, json.loads(json.dumps(scalars)))
    assert other.bound == one.bound
