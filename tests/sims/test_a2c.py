"""The on-policy baseline: its arithmetic, its tasks, and that it goes on where it stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from td3_robot_sims import tasks
from td3_robot_sims.a2c import A2C, A2CCore, discounted

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.errors import BundleError, ConfigError
from td3_robot.policy.actor import Actor

CARTPOLE = "discrete:CartPole-v1"


def config(**overrides: Any) -> Config:
    words = [f"{key}={value}" for key, value in overrides.items()]
    return configuration.load("cartpole_a2c", ["network.hidden=[8]", "evaluation.every=0", *words])


def test_discounted_returns() -> None:
    # from the back: 3 + 0.5*8 = 7; 2 + 0.5*7 = 5.5; 1 + 0.5*5.5 = 3.75
    np.testing.assert_array_equal(discounted([1.0, 2.0, 3.0], 0.5, 8.0), np.float32([3.75, 5.5, 7.0]))


def test_a_discrete_task_does_the_action_with_the_highest_score() -> None:
    environment = tasks.make(CARTPOLE, 0)
    assert [channel.name for channel in environment.spec.actions] == ["score_0", "score_1"]
    assert (environment.spec.actions[0].low, environment.spec.actions[0].high) == (-10.0, 10.0)
    environment.reset(3)
    right = environment.step(np.float32([-9.0, -8.0])).observation
    environment.reset(3)
    left = environment.step(np.float32([0.5, 0.5])).observation  # of equal ones the first
    assert right[1] > 0 > left[1]  # the cart's velocity
    environment.close()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("discrete:Pendulum-v1", "after 'discrete:' only Discrete ones"),
        ("discrete:Nothing-v0", "does not exist"),
        ("discrete:os:system-v0", "does not exist"),
    ],
)
def test_other_tasks_are_refused(task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tasks.make(task)


def test_the_baseline_refuses_continuous_tasks() -> None:
    with pytest.raises(ConfigError, match="'Walker2D'; the A2C baseline learns discrete actions"):
        A2CCore(configuration.parse({"task": "Walker2D"}))


def test_update_is_the_gradient_of_the_loss() -> None:
    """A first step of Adam is the learning rate against the sign of each gradient: compared with finite differences."""
    spec = tasks.spec(CARTPOLE)
    a2c = A2C(spec, config(**{"a2c.entropy": 0.1, "a2c.gradient_norm": 1e9}), seed=1)
    rng = np.random.default_rng(0)
    states = rng.normal(size=(6, 4)).astype(np.float32)
    actions = rng.integers(0, 2, 6)
    goals = rng.normal(size=6).astype(np.float32)
    parameters = list(a2c._networks.parameters())
    with torch.no_grad():
        baseline = a2c.critic(torch.from_numpy(states))[:, 0].double().numpy()

    def loss() -> float:
        with torch.no_grad():
            logits = a2c.logits(torch.from_numpy(states)).double().numpy()
            values = a2c.critic(torch.from_numpy(states))[:, 0].double().numpy()
        log_policy = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        advantage = goals - baseline
        advantage = (advantage - advantage.mean()) / advantage.std(ddof=1)
        actor = -(log_policy[np.arange(6), actions] * advantage).mean()
        entropy = -(np.exp(log_policy) * log_policy).sum(1).mean()
        return float(actor + ((goals - values) ** 2).mean() - 0.1 * entropy)

    numeric = []
    for parameter in parameters:
        flat = parameter.data.view(-1)
        slopes = np.empty(len(flat))
        for index in range(len(flat)):
            kept = float(flat[index])
            flat[index] = kept + 1e-2
            above = loss()
            flat[index] = kept - 1e-2
            slopes[index] = (above - loss()) / 2e-2
            flat[index] = kept
        numeric.append(slopes)
    before = [parameter.detach().clone() for parameter in parameters]
    a2c.update(states, actions, goals)
    for old, parameter, slopes in zip(before, parameters, numeric, strict=True):
        moved = (parameter.detach() - old).view(-1).numpy()
        clear = np.abs(slopes) > 0.02
        np.testing.assert_allclose(moved[clear], -1e-3 * np.sign(slopes[clear]), rtol=1e-3)
    assert sum((np.abs(slopes) > 0.02).sum() for slopes in numeric) > 40  # of 4·8+8+8·2+2 + 4·8+8+8+1 = 107
    assert a2c.updates == 1


def test_the_bundle_s_scores_are_the_logits() -> None:
    a2c = A2C(tasks.spec(CARTPOLE), config(), seed=2)
    states = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    with torch.no_grad():
        logits = a2c.logits(torch.from_numpy(states)).numpy()
    np.testing.assert_allclose(Actor(a2c.bundle({}))(states), logits, atol=1e-5)


def test_restored_it_goes_on_bit_for_bit(seed: int) -> None:
    straight = A2CCore(config(seed=seed))
    stopped = A2CCore(config(seed=seed))
    for turn in range(6):
        straight.step([], float(turn))
    for turn in range(3):
        stopped.step([], float(turn))
    arrays, scalars = stopped.state(3.0)
    resumed = A2CCore(config(seed=seed))
    resumed.restore(arrays, json.loads(json.dumps(scalars)))
    for turn in range(3, 6):
        resumed.step([], float(turn))
    assert (resumed.env_steps, resumed.a2c.updates) == (straight.env_steps, 6)
    for name, array in straight.a2c.state().items():
        np.testing.assert_array_equal(resumed.a2c.state()[name], array, err_msg=name)
    other = A2CCore(config(seed=seed, **{"network.hidden": "[9]"}))
    with pytest.raises(BundleError, match=r"A2C state: .*size mismatch"):
        other.restore(arrays, scalars)


def test_trained_evaluated_and_shown_by_the_commands(command: Any, tmp_path: Path) -> None:
    words = ["--set", "a2c.episodes=12", "--set", "evaluation.every=100", "--set", "evaluation.episodes=2"]
    training = command("train", "cartpole_a2c", "--out", "run", "--seed", "3", *words)
    assert training.finish() == 0, training.output()
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert [record["updates"] for record in train] == list(range(1, 13))
    assert all(math.isfinite(record["critic_loss"]) and record["entropy"] > 0 for record in train)
    assert [record["final"] for record in records if record["kind"] == "evaluation"][-1]
    assert (run / "curve.png").stat().st_size > 1000
    (saved,) = (run / "checkpoint").glob("checkpoint-*.safetensors")
    refused = command("bundle", "create", str(saved), "x.safetensors")
    assert refused.finish() == 2, refused.output()
    assert "is no checkpoint of TD3 or DDPG; name the run" in refused.lines[-1]
    evaluation = command("eval", "run/policy.safetensors", "--episodes", "2", "--json")
    assert evaluation.finish() == 0
    report = json.loads(evaluation.output().splitlines()[-1])
    assert (report["task"], report["provenance"]["algorithm"]) == (CARTPOLE, "A2C")
    assert all(length >= 8 for length in report["lengths"])
