"""Compares the plain TD3, and the engine FastTD3, with Stable-Baselines3 and with hand calculations.

O, A and B are the sizes of an observation, an action and a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.algorithms.td3 import TD3
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from tests.learner.td3_cases import A, B, O, batches, distance, noise_to_come, tensors_of, weights_of

pytestmark = pytest.mark.parametrize("kind", [TD3, FastTD3], ids=["plain", "engine"])


def test_policy_and_targets_change_only_at_the_delayed_step(kind: Any) -> None:
    td3 = kind(O, A, (24, 16), LearnerConfig(policy_delay=3, polyak=0.005), seed=1)
    start, start_targets = weights_of(td3), weights_of(td3, "target")
    assert distance(start, start_targets) == 0
    first, second, third = batches(3, seed=2)
    td3.learn(first)
    td3.learn(second)
    name = "actor.0.weight"
    assert np.array_equal(start[name], weights_of(td3)[name])
    assert distance(start_targets, weights_of(td3, "target")) == 0
    assert not np.array_equal(start["critic1.0.weight"], weights_of(td3)["critic1.0.weight"])
    td3.learn(third)
    online, targets = weights_of(td3), weights_of(td3, "target")
    assert not np.array_equal(start[name], online[name])
    # θ' ← θ' + 0.005 (θ - θ')
    for name in ("critic1.1.weight", "critic2.0.bias", "actor.2.weight"):
        moved = start[name] + 0.005 * (online[name] - start[name])
        np.testing.assert_allclose(targets[name], moved, atol=1e-8)


def test_the_next_observation_has_no_effect_only_if_the_discount_is_0(kind: Any) -> None:
    (batch,) = batches(1, seed=3)
    elsewhere = batch._replace(next_observation=batch.next_observation + 1)
    for on, same in ((torch.zeros(B, 1), True), (torch.ones(B, 1), False)):
        a, b = (kind(O, A, (24, 16), LearnerConfig(), seed=4) for _ in range(2))
        a.learn(batch._replace(discount=on))
        b.learn(elsewhere._replace(discount=on))
        assert (distance(weights_of(a), weights_of(b)) == 0) is same


def test_equals_stable_baselines3(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    class Nothing(gymnasium.Env):  # type: ignore[misc,name-defined]
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (O,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (A,), np.float32)

    config = LearnerConfig(learning_rate=1e-3)
    td3 = kind(O, A, (24, 16), config, seed=5)
    theirs: Any = sb3.TD3(
        "MlpPolicy", Nothing(), learning_rate=1e-3, policy_kwargs={"net_arch": [24, 16]}, device="cpu", buffer_size=1
    )
    theirs.set_logger(Logger(None, []))
    copies = [("online", "actor", theirs.actor.mu), ("target", "actor", theirs.actor_target.mu)]
    for head, index in (("critic1", 0), ("critic2", 1)):
        copies += [("online", head, theirs.critic.q_networks[index])]
        copies += [("target", head, theirs.critic_target.q_networks[index])]
    pairs = [
        (role, f"{head}.{number}.{name}", getattr(layer, name).data)
        for role, head, module in copies
        for number, layer in enumerate(layer for layer in module if isinstance(layer, torch.nn.Linear))
        for name in ("weight", "bias")
    ]
    for role, name, tensor in pairs:
        tensor.copy_(tensors_of(td3, role)[name])

    for batch in batches(20, seed=6):
        batch = batch._replace(discount=0.99 * (batch.discount > 0).float())
        noise = noise_to_come(td3) * config.target_noise
        samples = ReplayBufferSamples(
            batch.observation, batch.action, batch.next_observation, (batch.discount == 0).float(), batch.reward, None
        )
        td3.learn(batch)
        with monkeypatch.context() as patch:
            patch.setattr(theirs.replay_buffer, "sample", lambda *_a, samples=samples, **_k: samples)
            patch.setattr(torch.Tensor, "normal_", lambda _self, *_a, noise=noise: noise)
            theirs.train(gradient_steps=1, batch_size=B)

    # Both implementations use float32, but add in different orders. 20 steps of 1e-3 move a weight by up to 0.02,
    # which is 1,000 times the tolerance.
    for role, name, tensor in pairs:
        torch.testing.assert_close(tensors_of(td3, role)[name], tensor, atol=2e-5, rtol=0)


def test_reading_the_metrics_clears_the_means_and_keeps_the_gauges(kind: Any) -> None:
    td3 = kind(O, A, (24, 16), LearnerConfig(policy_delay=2), seed=51)
    assert td3.metrics() == dict.fromkeys((*TD3.means, *TD3.gauges), 0.0)
    first, second = batches(2, seed=52)
    td3.learn(first)
    assert td3.metrics()["actor_loss"] == 0.0
    td3.learn(second)
    metrics = td3.metrics()
    assert metrics["actor_loss"] != 0.0
    assert all(td3.metrics()[name] == 0.0 for name in TD3.means)
    assert all(td3.metrics()[name] == metrics[name] for name in TD3.gauges)


def test_gauges_match_a_hand_calculation(kind: Any) -> None:
    """All rewards are -3 and all discounts are 0, so every target y is -3.

    The bias of the actor's last layer is 9 in one of three dimensions. So in each action, one of three numbers is near
    a limit.
    """
    td3 = kind(O, A, (24, 16), LearnerConfig(policy_delay=1), seed=53)
    tensors_of(td3)["actor.2.bias"][1] = 9.0  # tanh 9 = 0.99999997
    td3.restored()
    (batch,) = batches(1, seed=54)
    td3.learn(batch._replace(reward=torch.full((B, 1), -3.0), discount=torch.zeros(B, 1)))
    metrics = td3.metrics()
    assert metrics["q_target_size"] == 3.0
    assert metrics["action_saturation"] == pytest.approx(1 / 3)


def test_clipping_keeps_the_direction_and_bounds_the_norm(kind: Any) -> None:
    """After one update, Adam's first moment is 0.1 times the gradient.

    The norm of the gradient is clipped to 0.01, so the norm of the moment is 0.001.
    """
    plain, clipped = (kind(O, A, (24, 16), LearnerConfig(gradient_clip=clip), seed=55) for clip in (None, 0.01))
    (batch,) = batches(1, seed=56)
    for td3 in (plain, clipped):
        td3.learn(batch)
    moments, free = weights_of(clipped, "adam_mean"), weights_of(plain, "adam_mean")
    for head in ("critic1", "critic2"):
        short, long = (
            np.concatenate([value.ravel() for name, value in found.items() if name.startswith(head)])
            for found in (moments, free)
        )
        assert np.linalg.norm(short) == pytest.approx(0.001, rel=1e-5)
        np.testing.assert_allclose(short / np.linalg.norm(short), long / np.linalg.norm(long), atol=1e-6)
    wide = kind(O, A, (24, 16), LearnerConfig(gradient_clip=1e6), seed=55)
    wide.learn(batch)
    assert distance(weights_of(wide), weights_of(plain)) == 0


def test_the_averaged_policy_matches_a_hand_calculation(kind: Any, seed: int) -> None:
    """With ``policy_average`` 0.4, the newest actor's share of the average is 1 at update 1, then 1/2, then 0.4."""
    config = LearnerConfig(batch_size=8, policy_delay=1, policy_average=0.4)
    td3 = kind(3, 2, (4,), config, seed=1)
    plain = kind(3, 2, (4,), LearnerConfig(batch_size=8, policy_delay=1), seed=1)
    buffer = ReplayBuffer(50, 3, 2, seed=2)
    rng = np.random.default_rng(seed)
    observation, following = (rng.normal(size=(50, 3)).astype(np.float32) for _ in range(2))
    action = rng.uniform(-1, 1, (50, 2)).astype(np.float32)
    buffer.add(observation, action, rng.normal(size=50).astype(np.float32), following, np.full(50, 0.99, np.float32))
    assert np.array_equal(td3.actor_tensors(averaged=True)["actor.0.weight"], td3.actor_tensors()["actor.0.weight"])
    expected = np.zeros(0)
    for weight in (1.0, 0.5, 0.4, 0.4):
        batch = buffer.sample(8)
        td3.learn(batch)
        plain.learn(batch)
        actor = td3.actor_tensors()["actor.0.weight"].astype(float)
        expected = actor if weight == 1.0 else (1 - weight) * expected + weight * actor
        np.testing.assert_allclose(td3.actor_tensors(averaged=True)["actor.0.weight"], expected, rtol=1e-5, atol=1e-7)
    # The average does not change learning.
    assert np.array_equal(plain.actor_tensors()["actor.0.weight"], td3.actor_tensors()["actor.0.weight"])
    other = kind(3, 2, (4,), config, seed=9)
    other.restore(*td3.state())
    kept = other.actor_tensors(averaged=True)
    assert all(np.array_equal(kept[name], value) for name, value in td3.actor_tensors(averaged=True).items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_actor_does_not_change_while_only_the_critics_learn(kind: Any, precision: Any) -> None:
    """With policy_delay 2 and critics_first 5, update 6 is the first that changes the actor and its target."""
    td3 = kind(O, A, (16,), LearnerConfig(critics_first=5, precision=precision), seed=1)
    start = weights_of(td3)
    for batch in batches(5, seed=2):
        td3.learn(batch)
    for name, value in start.items():
        if name.startswith("actor"):
            assert np.array_equal(weights_of(td3)[name], value)
            assert np.array_equal(weights_of(td3, "target")[name], value)
        else:
            assert not np.array_equal(weights_of(td3, "target")[name], value)
    assert td3.metrics()["actor_loss"] == 0
    [batch] = batches(1, seed=3)
    td3.learn(batch)
    for role in ("online", "target"):
        assert not np.array_equal(weights_of(td3, role)["actor.0.weight"], start["actor.0.weight"])
    assert td3.metrics()["actor_loss"] != 0


def test_the_mean_actor_loss_counts_only_the_updates_of_the_actor(kind: Any) -> None:
    """With policy_delay 2 and critics_first 5, updates 6 and 8 change the actor. All 8 updates have a critic loss."""
    stream, losses, critic_losses = batches(8, seed=2), [], []
    one_by_one, together = (kind(O, A, (16,), LearnerConfig(critics_first=5), seed=1) for _ in range(2))
    for batch in stream:
        one_by_one.learn(batch)
        together.learn(batch)
        metrics = one_by_one.metrics()
        losses.append(metrics["actor_loss"])
        critic_losses.append(metrics["critic_loss"])
    assert [loss != 0 for loss in losses] == [False] * 5 + [True, False, True]
    metrics = together.metrics()
    assert metrics["actor_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert metrics["critic_loss"] == pytest.approx(sum(critic_losses) / 8, rel=1e-5)
