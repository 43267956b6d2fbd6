"""A saved state can have wrong values although its hash is right. Each part of the learner refuses wrong values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from td3_robot.learner.divergence import Divergence
from td3_robot.learner.normaliser import Normaliser
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.learner.replay_buffer.prioritised import PrioritisedReplay

ROWS = 4


def divergence() -> Any:
    return Divergence(0.9)


def normaliser() -> Any:
    return Normaliser(3)


def buffer() -> Any:
    made = ReplayBuffer(10, 3, 2, seed=0)
    made.add(*columns())
    return made


def prioritised() -> Any:
    made = PrioritisedReplay(10, 3, 2, seed=0, exponent=0.4)
    made.add(*columns())
    return made


def columns() -> list[Any]:
    return [np.ones(shape, np.float32) for shape in ((ROWS, 3), (ROWS, 2), (ROWS,), (ROWS, 3), (ROWS,))]


@pytest.mark.parametrize(
    ("make", "name", "value", "words"),
    [
        (divergence, "greatest_reward", float("nan"), "greatest reward"),
        (divergence, "greatest_reward", 0.5, "greatest reward"),
        (divergence, "greatest_reward", float("inf"), "greatest reward"),
        (normaliser, "mean", np.zeros(2), "observation statistics"),
        (normaliser, "mean", np.array([0.0, np.nan, 0.0]), "observation statistics"),
        (normaliser, "squares", np.array([0.0, -1.0, 0.0]), "observation statistics"),
        (normaliser, "count", -1, "observation statistics"),
        (buffer, "rows", np.zeros((ROWS - 1, 10), np.float32), "the rows are"),
        (buffer, "rows", np.zeros((ROWS, 1), np.float32), "the rows are"),
        (buffer, "rows", np.zeros((ROWS, 10), np.float64), "the rows are"),
        (buffer, "capacity", 11, "the saved capacity is 11"),
        (buffer, "total_added", -4, "total_added is -4"),
        (prioritised, "priorities", np.ones(ROWS - 1), "the priorities must be"),
        (prioritised, "priorities", np.array([1, 1, np.nan, 1]), "the priorities must be"),
        (prioritised, "priorities", np.array([1, 1, 0.0, 1]), "the priorities must be"),
        (prioritised, "greatest_priority", float("inf"), "the priorities must be"),
    ],
)
def test_a_wrong_value_is_refused(make: Any, name: str, value: Any, words: str) -> None:
    arrays, scalars = make().state()
    part: dict[str, Any] = arrays if name in arrays else scalars
    assert name in part
    part[name] = value
    with pytest.raises(ValueError, match=words):
        make().restore(arrays, scalars)


@pytest.mark.parametrize("make", [divergence, normaliser, buffer, prioritised])
def test_the_right_values_are_restored(make: Any) -> None:
    arrays, scalars = make().state()
    other = make()
    other.restore(arrays, scalars)
    again, values = other.state()
    assert values == scalars
    assert {name: each.tolist() for name, each in again.items()} == {
        name: each.tolist() for name, each in arrays.items()
    }
