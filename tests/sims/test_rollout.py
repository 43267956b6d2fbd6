"""Evaluation episodes with observations or rewards that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from td3_robot_sims import rollout
from td3_robot_sims.backends.base import Outcome

from td3_robot.errors import NodeError
from td3_robot.specs import Float32


def actor(observation: Float32) -> Float32:
    assert np.isfinite(observation).all()
    return np.zeros((1, 2), np.float32)


@pytest.fixture
def environment(scripted: Callable[..., Any]) -> Any:
    """An environment whose episodes have 3 steps."""
    return scripted([(3, True, False)])


def error(environment: Any) -> str:
    """Run two episodes. Return the text of the error."""
    with pytest.raises(NodeError) as failed:
        list(rollout.episodes(environment, actor, 2, 0, 10))  # type: ignore[arg-type]
    return str(failed.value)


def returning(
    environment: Any, monkeypatch: pytest.MonkeyPatch, step: int, observation: float, reward: float = 1.0
) -> Any:
    """Let the given step of each episode return these values."""
    sound = environment.step

    def changed(action: Float32) -> Outcome:
        outcome: Outcome = sound(action)
        if environment.count == step:
            return outcome._replace(observation=np.full(3, observation, np.float32), reward=reward)
        return outcome

    monkeypatch.setattr(environment, "step", changed)
    return environment


def test_the_error_names_an_observation_that_is_not_finite(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = environment.spec.observations[0].name
    assert error(returning(environment, monkeypatch, 2, np.nan)) == (
        f"task 'toy:Scripted': after step 2 of episode 0, observation 0 ({name!r}) is nan; it must be finite"
    )


def test_the_error_names_a_first_observation_that_is_not_finite(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = environment.spec.observations[1].name
    monkeypatch.setattr(environment, "reset", lambda _: np.array([0, -np.inf, 0], np.float32))
    assert error(environment) == (
        f"task 'toy:Scripted': after the reset of episode 0, observation 1 ({name!r}) is -inf; it must be finite"
    )


def test_the_error_names_a_reward_that_is_not_finite(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(returning(environment, monkeypatch, 3, np.nan, np.inf)) == (
        "task 'toy:Scripted': the reward of step 3 of episode 0 is inf; it must be finite"
    )


def test_an_observation_that_the_policy_does_not_get_may_be_anything(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    returning(environment, monkeypatch, 3, np.nan)
    results = [item for item in rollout.episodes(environment, actor, 2, 0, 10) if item]  # type: ignore[arg-type]
    assert results == [rollout.Episode(4.0, 3)] * 2
