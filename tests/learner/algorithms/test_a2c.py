"""Compares the update of A2C with hand calculations and with finite differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.config.schema import A2CConfig
from td3_robot.learner.algorithms.a2c import A2C, returns
from td3_robot.learner.replay_buffer.buffer import Batch


def made(**options: float) -> A2C:
    config = LearnerConfig(algorithm="a2c", learning_starts=0, learning_rate=1e-3)
    return A2C(4, 2, (8,), config, seed=1, options=A2CConfig(**options))  # type: ignore[arg-type]


def episode(rng: np.random.Generator, steps: int) -> Batch:
    """An episode of random transitions with γ = 0.9. The last transition terminates."""
    s, s2 = (torch.from_numpy(rng.normal(size=(steps, 4)).astype(np.float32)) for _ in range(2))
    a = torch.from_numpy(np.where(np.eye(2)[rng.integers(0, 2, steps)], 1, -1).astype(np.float32))
    discount = torch.full((steps, 1), 0.9)
    discount[-1] = 0
    return Batch(s, a, torch.from_numpy(rng.normal(size=(steps, 1)).astype(np.float32)), s2, discount)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        # The comments give the returns in reverse order, from the last step to the first.
        (0.5, [3.75, 5.5, 7.0]),  # a truncated episode: 3 + 0.5·8 = 7; 2 + 0.5·7 = 5.5; 1 + 0.5·5.5 = 3.75
        (0.0, [2.75, 3.5, 3.0]),  # a terminated episode: 3; 2 + 0.5·3 = 3.5; 1 + 0.5·3.5 = 2.75
    ],
)
def test_returns_match_a_hand_calculation(last: float, expected: list[float]) -> None:
    """The rewards are 1, 2 and 3. γ is 0.5. The critic's value of the last observation is 8."""
    found = returns(torch.tensor([[1.0], [2], [3]]), torch.tensor([[0.5], [0.5], [last]]), torch.tensor([[8.0]]))
    assert found[:, 0].tolist() == expected


def test_an_update_follows_the_gradient_of_the_loss() -> None:
    """Adam's first step moves each parameter by the learning rate, against the sign of its gradient.

    The test computes the gradients as finite differences.
    """
    a2c = made(entropy=0.1, gradient_norm=1e9)
    batch = episode(np.random.default_rng(0), 6)
    chosen = batch.action.argmax(1).numpy()
    goal = returns(batch.reward, batch.discount, torch.zeros(1, 1))[:, 0].double().numpy()
    parameters = [*a2c.actor.parameters(), *a2c.critic.parameters()]
    with torch.no_grad():
        baseline = a2c.critic(batch.observation)[:, 0].double().numpy()

    def loss() -> float:
        with torch.no_grad():
            logits = 10 * a2c.actor(batch.observation).double().numpy()
            values = a2c.critic(batch.observation)[:, 0].double().numpy()
        log_policy = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        advantage = goal - baseline
        advantage = (advantage - advantage.mean()) / advantage.std(ddof=1)
        actor = -(log_policy[np.arange(6), chosen] * advantage).mean()
        entropy = -(np.exp(log_policy) * log_policy).sum(1).mean()
        return float(actor + ((goal - values) ** 2).mean() - 0.1 * entropy)

    numeric = []
    for parameter in parameters:
        flat = parameter.data.view(-1)
        slopes = np.empty(len(flat))
        for index in range(len(flat)):
            kept = float(flat[index])
            flat[index] = kept + 1e-3
            above = loss()
            flat[index] = kept - 1e-3
            slopes[index] = (above - loss()) / 2e-3
            flat[index] = kept
        numeric.append(slopes)
    before = [parameter.detach().clone() for parameter in parameters]
    a2c.learn(batch)
    for old, parameter, slopes in zip(before, parameters, numeric, strict=True):
        moved = (parameter.detach() - old).view(-1).numpy()
        clear = np.abs(slopes) > 0.02
        np.testing.assert_allclose(moved[clear], -1e-3 * np.sign(slopes[clear]), rtol=1e-3)
    # The actor has 4·8 + 8 + 8·2 + 2 = 58 parameters. The critic has 4·8 + 8 + 8·1 + 1 = 49.
    assert sum((np.abs(slopes) > 0.02).sum() for slopes in numeric) > 40  # of 58 + 49 parameters


def test_progress_reaches_1_after_the_configured_episodes() -> None:
    a2c = made(episodes=4)
    rng = np.random.default_rng(0)
    progress = [a2c.progress]
    for _ in range(5):
        a2c.learn(episode(rng, 3))
        progress.append(a2c.progress)
    assert progress == [0, 0.25, 0.5, 0.75, 1, 1]


def test_an_episode_of_one_step_gives_finite_and_documented_metrics() -> None:
    a2c = made()
    a2c.learn(episode(np.random.default_rng(0), 1))
    found = a2c.metrics()
    assert all(np.isfinite(value) for value in found.values())
    document = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert not {name for name in found if f"`{name}`" not in document}
