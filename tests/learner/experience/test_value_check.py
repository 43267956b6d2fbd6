"""Tests the comparison of observed returns with the critic's values: hand calculations, gaps, and a known critic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.experience.transitions import Assembler
from td3_robot.learner.experience.value_check import ValueCheck
from td3_robot.learner.normaliser import Normaliser
from td3_robot.messages import Step
from tests.learner.experience.test_transitions import history


def check_of(stream: list[Step]) -> ValueCheck:
    assembler, check = Assembler(), ValueCheck(0.5)
    for step in stream:
        transitions = assembler.add(step)
        if transitions is not None:
            check.add("s", transitions, step)
    return check


def test_discounted_returns_match_a_hand_calculation() -> None:
    """γ is 1/2. The first episode has rewards 1, 2 and 3, and is truncated. The second has 1 and 2, and terminates.

    ``left`` is the weight of the critic's value of the last observation. The first return is 1 + 2/2 + 3/4 = 2.75, and
    ``left`` is γ³ = 1/8. The second return is 1 + 2/2 = 2, and ``left`` is 0, because the episode terminates.
    """
    check = check_of(history([[(3, False), (2, True)]], 7, 0))
    first, second = check.episodes
    assert (first.discounted, first.left, first.observation.tolist(), first.last_observation.tolist()) == (
        2.75,
        0.125,
        [0, 0, 0, 0],
        [0, 0, 0, 3],
    )
    assert (second.discounted, second.left, second.observation.tolist()) == (2.0, 0.0, [0, 0, 1, 0])


def test_only_complete_episodes_count() -> None:
    """Each episode of robot 0 has 4 transitions (5 Steps). Each episode of robot 1 has 6 transitions (7 Steps).

    Step 2 is lost, and the source restarts later.
    """
    stream = history([[(4, True)], [(6, True)]], 12, 0) + history([[(4, True)], [(6, True)]], 7, 1)
    check = check_of([step for step in stream if not (step.incarnation == 0 and step.sequence == 2)])
    # Robot 0: the gap cuts episode 0, and the restart cuts episode 2. Episode 1 is complete (Steps 5 to 9).
    # Robot 1: the gap cuts episode 0, and the restart cuts episode 1.
    # After the restart, the first episode of each robot is complete.
    found = [tuple(map(int, episode.observation[:3])) for episode in check.episodes]
    assert found == [(0, 0, 1), (1, 0, 0), (1, 1, 0)]


@pytest.mark.parametrize("normalise", [False, True])
def test_figures_of_a_known_critic_match_a_hand_calculation(normalise: bool) -> None:
    """The critic's value is always 10.

    γ is 1/2. The first episode is truncated after 3 rewards. The critic's value 10 also counts rewards after the
    truncation. They make up γ³ · 10 of it. So the expected return of the first episode is 10 - γ³ · 10 = 8.75, and its
    observed return is 2.75. The second episode terminates: its expected return is 10, and its observed return is 2. The
    figures are the means of both episodes.
    """
    td3 = FastTD3(4, 2, (8,), LearnerConfig(), seed=1)
    td3.critics.flat.zero_()
    td3.critics.named["critic1.1.bias"].fill_(10)
    td3.critics.refresh()
    check = check_of(history([[(3, False), (2, True)]], 7, 0))
    figures = check.figures(td3, Normaliser(4) if normalise else None)
    assert figures == {"return_discounted_mean": pytest.approx(2.375), "return_expected_mean": pytest.approx(9.375)}
    assert ValueCheck(0.5).figures(td3, None) == {}


def test_the_critic_uses_the_action_of_the_policy_if_no_action_is_given() -> None:
    """Critic and policy have one hidden unit. Q is 2 relu(s₀ + a₀), and the policy's action is tanh(0.5 relu(s₀))."""
    td3 = FastTD3(1, 1, (1,), LearnerConfig(), seed=1)
    for name, value in {"critic1.0.weight": [[1, 1]], "critic1.1.weight": [[2]]}.items():
        td3.critics.named[name].copy_(torch.tensor(value, dtype=torch.float32))
    td3.critics.named["critic1.0.bias"].zero_()
    td3.critics.named["critic1.1.bias"].zero_()
    td3.actor.flat.zero_()
    td3.actor.named["actor.0.weight"].fill_(1)
    td3.actor.named["actor.1.weight"].fill_(0.5)
    for network in (td3.critics, td3.actor):
        network.refresh()
    s, a = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5], [-1.0]])
    np.testing.assert_allclose(td3.values(s, a), [[3.0], [2.0]], rtol=1e-6)
    np.testing.assert_allclose(td3.values(s), [[2 * (1 + np.tanh(0.5))], [2 * (2 + np.tanh(1.0))]], rtol=1e-6)
