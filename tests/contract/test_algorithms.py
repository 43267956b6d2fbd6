"""Contract tests for every built-in algorithm, the engine of TD3 and DDPG, and two examples of users' algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from td3_robot.config.learner import LearnerConfig
from td3_robot.config.loading import parse
from td3_robot.config.schema import ExplorationConfig
from td3_robot.errors import ConfigError
from td3_robot.learner.algorithms.a2c import A2C
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.ddpg import DDPG
from td3_robot.learner.algorithms.metrics import Metrics
from td3_robot.learner.algorithms.networks import Actor, Perceptron
from td3_robot.learner.algorithms.table import ALGORITHMS, CONSUMES, IMPLIED, USES
from td3_robot.learner.algorithms.td3 import TD3
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.factory import make_core, networks
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.learner.resources import needs
from td3_robot.specs import RobotSpec
from tests.contract.algorithm import AlgorithmContract
from tests.contract.sign_learner import SignLearner

DDPG_CONFIG = replace(AlgorithmContract.config, algorithm="ddpg", **IMPLIED["ddpg"])
OPTIONS = LearnerConfig(
    learning_rate=1e-3,
    batch_size=32,
    layer_norm=True,
    critic_loss="huber",
    gradient_clip=0.5,
    policy_average=0.1,
    critics_first=1,
)


class MeanOfCritics(TD3):
    """An example of a user's variant of TD3: it uses the mean of both critics and an L2 penalty on the actor."""

    def update(self, batch: Batch) -> Metrics:
        """Update critics and actor together, without delay."""
        s, a, r, s2, discount = batch
        with torch.no_grad():
            y = r + discount * torch.stack(self.critics_target(s2, self.actor_target(s2))).mean(0)
        critic_loss = torch.stack([(q - y).abs().mean() for q in self.critics(s, a)]).sum()
        self.minimise(critic_loss, self.critics_optimiser)
        weights = torch.stack([parameter.square().sum() for parameter in self.actor.parameters()]).sum()
        actor_loss = 1e-3 * weights - torch.stack(self.critics(s, self.actor(s))).mean()
        self.minimise(actor_loss, self.actor_optimiser)
        return {"critic_loss": critic_loss, "actor_loss": actor_loss}


class Ensemble(Algorithm):
    """An example of an algorithm with critics and optimisers in lists, and with a head that is not trained."""

    def build(self) -> None:
        """Create an actor, three critics and an optimiser for each critic. The last optimiser also has the head."""
        sizes = [self.observation_size + self.action_size, *self.hidden, 1]
        self.actor = self.network(Actor([self.observation_size, *self.hidden, self.action_size]))
        self.critics = [self.network(Perceptron(sizes)) for _ in range(3)]
        self.scale = {"value": torch.ones((), requires_grad=True, device=self.device)}
        self.head = self.network(Perceptron(sizes))
        self.actor_optimiser = self.adam(self.actor)
        self.optimisers = [self.adam(critic) for critic in self.critics[:2]]
        self.optimisers.append(self.adam(self.critics[2], self.head))
        self.optimisers[0].add_param_group({"params": [self.scale["value"]], "lr": 10 * self.config.learning_rate})

    def update(self, batch: Batch) -> Metrics:
        """Fit the critics to the reward, then improve the actor."""
        s, a, r, *_ = batch
        sa = torch.cat((s, a), 1)
        for critic, optimiser in zip(self.critics, self.optimisers, strict=True):
            self.minimise((self.scale["value"] * critic(sa) - r).square().mean(), optimiser)
        values = self.critics[0](torch.cat((s, self.actor(s)), 1))
        return {"gradient": self.minimise(-values.mean(), self.actor_optimiser)}


def test_a_group_with_its_own_learning_rate_keeps_its_share() -> None:
    made = Ensemble(3, 2, (5,), LearnerConfig(learning_rate=1e-3), 1)
    for rate in (1e-3, 5e-4, 1e-4):
        made.set_learning_rate(rate)
        assert [group["lr"] for group in made.optimisers[0].param_groups] == pytest.approx([rate, 10 * rate])
        assert made.actor_optimiser.param_groups[0]["lr"] == rate


class TestEnsemble(AlgorithmContract):
    algorithm = Ensemble


class TestTD3(AlgorithmContract):
    algorithm = TD3


class TestTD3WithOptions(AlgorithmContract):
    algorithm, config = TD3, OPTIONS


class TestTD3InBfloat16(AlgorithmContract):
    algorithm, config = TD3, replace(OPTIONS, precision="bf16")


class TestDDPG(AlgorithmContract):
    algorithm, config = DDPG, DDPG_CONFIG


class TestA2C(AlgorithmContract):
    algorithm = A2C


class TestEngine(AlgorithmContract):
    algorithm = FastTD3


class TestEngineWithOptions(AlgorithmContract):
    algorithm, config = FastTD3, OPTIONS


class TestEngineInBfloat16(AlgorithmContract):
    algorithm, config = FastTD3, replace(OPTIONS, precision="bf16")


class TestEngineOfDDPG(AlgorithmContract):
    algorithm, config = FastTD3, DDPG_CONFIG


class TestSubclass(AlgorithmContract):
    algorithm = MeanOfCritics


class TestSignLearner(AlgorithmContract):
    algorithm = SignLearner


class PolicyGradient(A2C):
    """An example of an on-policy algorithm of another package."""


def test_an_on_policy_algorithm_of_another_package_needs_no_replay_buffer(
    monkeypatch: pytest.MonkeyPatch, spec: RobotSpec
) -> None:
    """100 robots are too many for the replay ratio band. The band applies only to algorithms with a replay buffer."""
    rows = {"mine": f"{__name__}:PolicyGradient", "theirs": f"{__name__}:MeanOfCritics"}
    monkeypatch.setattr(ALGORITHMS, "_own", {**ALGORITHMS._own, **rows})
    values = {"robots": 100, "network": {"hidden": [5]}}
    mine, theirs = (parse({**values, "learner": {"algorithm": name}}) for name in rows)
    make_core(mine).start(spec)
    words = r"replay_ratio_band is 64\.0; it must be at least 101 with 1 simulators of 100 robots"
    with pytest.raises(ConfigError, match=words):
        make_core(theirs).start(spec)
    with pytest.raises(ConfigError, match="exploration is set, but the algorithm sets its own exploration"):
        make_core(replace(mine, exploration=ExplorationConfig(noise=0.2))).start(spec)
    # The networks have 3 inputs and 5 hidden neurons. The actor has 2 outputs: 5 · (3 + 1) + 2 · (5 + 1) = 32 weights
    # and biases. V has 1 output: 5 · (3 + 1) + 5 + 1 = 26.
    assert networks(mine, spec) == (58, 58, False)
    # A learner keeps parameters, gradients and Adam's two moments, with 4 bytes for each number.
    assert needs(mine, 3, 2, networks(mine, spec)).kept == 4 * 4 * 58
    assert needs(theirs, 3, 2, networks(theirs, spec)) == needs(parse({"network": {"hidden": [5]}, "robots": 50}), 3, 2)


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_row_of_the_algorithm_table_is_an_algorithm(name: str) -> None:
    algorithm: Any = ALGORITHMS.load(name)
    assert issubclass(algorithm, Algorithm)
    assert algorithm.consumes == CONSUMES[name]
    assert {*IMPLIED, *USES} <= set(ALGORITHMS.names())
