"""Noise-free episodes of a policy: what evaluation is, in training and from the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from td3_robot.errors import NodeError
from td3_robot.policy.actor import Actor
from td3_robot_sims.backends.base import Environment


@dataclass(frozen=True)
class Episode:
    """The undiscounted return and the length (steps) of one episode."""

    episode_return: float
    length: int


def episodes(
    environment: Environment,
    actor: Actor,
    count: int,
    seed: int,
    max_steps: int,
    frame: Callable[[], None] | None = None,
) -> Iterator[Episode | None]:
    """Run ``count`` episodes from a seeded start, one step at a time: None after each step, an Episode after its last.

    An episode of a task without a time limit of its own ends after ``max_steps``. The same seed gives the same starts,
    so two policies are compared on the same ones. ``frame`` is called after every reset and step.

    Raises:
        NodeError: a reward is not finite.
    """
    for number in range(count):
        observation = environment.reset(seed if number == 0 else None)
        total, length, over = 0.0, 0, False
        if frame:
            frame()
        while not over:
            outcome = environment.step(actor(observation[None])[0])
            observation = outcome.observation
            if not math.isfinite(outcome.reward):
                name, where = environment.spec.name, f"step {length + 1} of episode {number}"
                raise NodeError(f"task {name!r}: the reward of {where} is {outcome.reward}; it must be finite")
            total, length = total + outcome.reward, length + 1
            over = outcome.terminated or outcome.truncated or length == max_steps
            if frame:
                frame()
            yield Episode(total, length) if over else None
