"""The error for a wrong result of an environment names the task, the field, its value and what is allowed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from td3_robot.errors import EXIT_USAGE, NodeError
from td3_robot.specs import Float32
from tests.contract.point_mass import PointMass

OBSERVATION = np.zeros(2, np.float32)


class Returns(PointMass):
    """An environment whose methods return ``result``."""

    def __init__(self, result: Any) -> None:
        super().__init__(1, None)
        self.task_name = "toy:Point"
        self.result = result

    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        del action
        result: tuple[Float32, float, bool, bool] = self.result
        return result


class ReturnsAtReset(Returns):
    def _reset(self) -> Float32:
        observation: Float32 = self.result
        return observation


def refused(environment: PointMass) -> str:
    """Return the error of a reset and a step."""
    with pytest.raises(NodeError) as error:
        trace(environment)
    assert error.value.exit_code == EXIT_USAGE, "the supervisor would start the simulator again"
    return str(error.value).removeprefix("task 'toy:Point': ")


def trace(environment: PointMass) -> Any:
    environment.reset()
    return environment.step(np.zeros(1, np.float32))


class Leaves(Returns):
    """An environment whose method ``result`` ends the process."""

    def _reset(self) -> Float32:
        return sys.exit(3) if self.result == "reset" else super()._reset()

    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        del action
        sys.exit("no licence")


def test_an_exit_in_a_reset_or_a_step_is_an_error() -> None:
    assert refused(Leaves("reset")) == "reset() called sys.exit(3); it must return, or raise an exception"
    assert refused(Leaves("step")) == "step() called sys.exit('no licence'); it must return, or raise an exception"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "the observation of reset() is None; it must be numbers of shape (2,)"),
        (np.zeros(3, np.float32), "the observation of reset() has shape (3,); it must be (2,)"),
        ("left", "the observation of reset() is 'left'; it must be numbers of shape (2,)"),
    ],
)
def test_the_error_says_what_is_wrong_with_a_reset(result: Any, text: str) -> None:
    assert refused(ReturnsAtReset(result)) == text


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            (OBSERVATION, 1.0, False),
            "_step() returned 3 values; it must return 4 values: observation, reward, terminated, truncated",
        ),
        (None, "_step() returned None; it must return 4 values: observation, reward, terminated, truncated"),
        ((np.zeros(3, np.float32), 1.0, False, False), "the observation of step() has shape (3,); it must be (2,)"),
        ((OBSERVATION, None, False, False), "the field 'reward' of step() is None; it must be a number"),
        (
            (OBSERVATION, np.ones(2), False, False),
            "the field 'reward' of step() is an array of shape (2,); it must be a number",
        ),
        ((OBSERVATION, 1.0, None, False), "the field 'terminated' of step() is None; it must be True or False"),
        ((OBSERVATION, 1.0, False, "no"), "the field 'truncated' of step() is 'no'; it must be True or False"),
    ],
)
def test_the_error_says_what_is_wrong_with_a_step(result: Any, text: str) -> None:
    assert refused(Returns(result)) == text


@pytest.mark.parametrize(
    "result",
    [
        (OBSERVATION, 1.0, False, False),
        [[0, 0], 1, 0, np.False_],
        (OBSERVATION.astype(np.float64), np.float32(1), np.False_, False),
    ],
)
def test_results_of_other_types_are_converted(result: Any) -> None:
    outcome = trace(Returns(result))
    assert outcome.observation.dtype == np.float32
    assert [outcome.observation.tolist(), *outcome[1:]] == [[0.0, 0.0], 1.0, False, False]
    assert [type(value) for value in outcome[1:]] == [float, bool, bool]


def test_an_environment_may_reuse_the_array_of_its_observations() -> None:
    observation = np.ones(2, np.float32)
    environment = Returns((observation, 1.0, False, False))
    trace(environment)
    observation[:] = 5
    assert environment.save_state()["observation"].tolist() == [1, 1]


def test_a_term_of_the_reward_must_be_a_number() -> None:
    environment = Returns((OBSERVATION, 1.0, False, False))
    trace(environment)
    environment._terms = {"far": "low"}  # type: ignore[dict-item] # the mistake to test
    with pytest.raises(
        NodeError, match=r"^task 'toy:Point': the term 'far' of step\(\) is 'low'; it must be a number$"
    ):
        environment.reward_terms()
