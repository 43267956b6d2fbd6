"""The numpy actor, compared with hand calculations and with torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from td3_robot.bundle import Bundle
from td3_robot.policy.actor import Actor
from td3_robot.specs import Channel, RobotSpec


def test_actor_matches_a_hand_calculation() -> None:
    """One hidden unit: h = relu(2·1 + 3·(-1) + 1.5) = 0.5. The output is tanh(4·0.5 - 1) = tanh(1) = 0.76159416.

    Limits [-1, 3] have half range 2 and middle 1. The action is 0.76159416 · 2 + 1 = 2.5231883.
    """
    spec = RobotSpec(
        "Hand", (Channel("a", "1", -5, 5), Channel("b", "1", -5, 5)), (Channel("u", "N", -1.0, 3.0),), 0.02
    )
    tensors = {
        "actor.0.weight": np.array([[2, 3]], np.float32),
        "actor.0.bias": np.array([1.5], np.float32),
        "actor.1.weight": np.array([[4]], np.float32),
        "actor.1.bias": np.array([-1], np.float32),
    }
    actor = Actor(Bundle(spec, (1,), tensors))
    assert actor(np.array([[1, -1]], np.float32))[0, 0] == np.float32(np.tanh(np.float32(1))) * 2 + 1
    # With -3 in channel b, 2·1 + 3·(-3) + 1.5 < 0. So h = 0, and the action is tanh(-1) · 2 + 1 = -0.5231883.
    np.testing.assert_allclose(actor(np.array([[1, -3]], np.float32)), [[-0.5231883]], rtol=1e-6)


def test_actor_agrees_with_torch(make_bundle: Callable[..., Bundle], rng: np.random.Generator) -> None:
    bundle = make_bundle(3, hidden=(400, 300), tame=True)
    actor = Actor(bundle)
    layers = [
        (torch.from_numpy(bundle.tensors[f"actor.{i}.weight"]), torch.from_numpy(bundle.tensors[f"actor.{i}.bias"]))
        for i in range(3)
    ]
    for rows in (1, 5, 1, 64):
        observation = rng.normal(size=(rows, 3)).astype(np.float32)
        x = torch.from_numpy(observation)
        for weight, bias in layers[:-1]:
            x = torch.relu(torch.nn.functional.linear(x, weight, bias))
        x = torch.tanh(torch.nn.functional.linear(x, *layers[-1]))
        expected = x.numpy() * actor.half + actor.middle
        np.testing.assert_allclose(actor(observation), expected, rtol=1e-5, atol=1e-5)


def test_limits_hold_at_saturation(make_bundle: Callable[..., Bundle]) -> None:
    actor = Actor(make_bundle(1))
    action = actor(np.full((4, 3), 1e6, np.float32))
    assert (action >= actor.low).all()
    assert (action <= actor.high).all()


def test_each_call_returns_a_new_array(make_bundle: Callable[..., Bundle], rng: np.random.Generator) -> None:
    actor = Actor(make_bundle(1))
    first = actor(rng.normal(size=(1, 3)).astype(np.float32))
    kept = first.copy()
    actor(rng.normal(size=(1, 3)).astype(np.float32))
    assert np.array_equal(first, kept)


def test_normalisation_matches_a_hand_calculation() -> None:
    """The means are 1 and 0, and the deviations are 0.5 and 0.01. So the observation (2, -0.02) becomes (2, -2).

    The observation (2, 5) becomes (2, 500), and the actor clips it to (2, 10).
    There is one hidden unit. The first observation gives h = relu(2·2 + 3·(-2) + 3) = 1 and u = tanh(1/16).
    The second observation gives h = 2·2 + 3·10 + 3 = 37 and u = tanh(37/16).
    """
    spec = RobotSpec(
        "Hand", (Channel("a", "1", -5, 5), Channel("b", "1", -5, 5)), (Channel("u", "N", -1.0, 1.0),), 0.02
    )
    tensors = {
        "actor.0.weight": np.array([[2, 3]], np.float32),
        "actor.0.bias": np.array([3], np.float32),
        "actor.1.weight": np.array([[1 / 16]], np.float32),
        "actor.1.bias": np.array([0], np.float32),
        "observation.mean": np.array([1, 0], np.float32),
        "observation.std": np.array([0.5, 0.01], np.float32),
    }
    actor = Actor(Bundle(spec, (1,), tensors))
    np.testing.assert_allclose(
        actor(np.array([[2, -0.02], [2, 5]], np.float32)), [[0.06241875], [0.98058305]], rtol=1e-6
    )
