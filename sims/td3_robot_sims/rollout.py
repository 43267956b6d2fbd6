"""Evaluation episodes: a policy without noise in one environment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from td3_robot.errors import NodeError
from td3_robot.policy.actor import Actor
from td3_robot.specs import Float32
from td3_robot.util.arrays import finite
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.finiteness import not_finite

SEED_OFFSET = 1_000_003
"""Evaluations add this number to their seed, so that their starting states differ from those of the training."""


class Episode(NamedTuple):
    """The undiscounted return and the length in steps of one episode."""

    episode_return: float
    length: int


def episodes(environment: Environment, actor: Actor, count: int, seed: int, max_steps: int) -> Iterator[Episode | None]:
    """Run ``count`` episodes.

    Args:
        seed: seed of the starting states.
        max_steps: an episode ends after at most this number of steps, even if the task has no time limit.

    Yields:
        One item after each reset and each step: an Episode after the last step of an episode, otherwise None.

    Raises:
        NodeError: a reward, or an observation for the policy, is not finite.
    """
    for number in range(count):
        observation = environment.reset(seed if number == 0 else None)
        yield None
        total, length, over = 0.0, 0, False
        while not over:
            _check(environment, observation, number, length)
            outcome = environment.step(actor(observation[None])[0])
            observation = outcome.observation
            if not math.isfinite(outcome.reward):
                what = f"the reward of step {length + 1} of episode {number} is {outcome.reward}"
                raise NodeError(f"task {environment.task_name!r}: {what}; it must be finite")
            total, length = total + outcome.reward, length + 1
            over = outcome.terminated or outcome.truncated or length == max_steps
            yield Episode(total, length) if over else None


def _check(environment: Environment, observation: Float32, number: int, length: int) -> None:
    """Check an observation of an episode before the policy gets it. Without this check, the error blames the action."""
    if not finite(observation):
        moment = f"step {length}" if length else "the reset"
        problem = not_finite(environment.spec, observation)
        where = f"after {moment} of episode {number}"
        raise NodeError(f"task {environment.task_name!r}: {where}, {problem}; it must be finite")
