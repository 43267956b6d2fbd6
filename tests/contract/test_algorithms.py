"""Contract tests for every algorithm, with and without its engine, for a subclass and for an example package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.algorithms.a2c import A2C
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.ddpg import DDPG
from td3_robot.learner.algorithms.metrics import Metrics
from td3_robot.learner.algorithms.table import ALGORITHMS, IMPLIED, ON_POLICY, UNUSED
from td3_robot.learner.algorithms.td3 import TD3
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.replay_buffer.buffer import Batch
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


class SumOfCritics(TD3):
    """An example of a user's variant of TD3: it uses the mean of both critics and weight decay in the actor."""

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
    algorithm = SumOfCritics


class TestSignLearner(AlgorithmContract):
    algorithm = SignLearner


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_row_is_an_algorithm(name: str) -> None:
    algorithm: Any = ALGORITHMS.load(name)
    assert issubclass(algorithm, Algorithm)
    assert algorithm.consumes == ("rollouts" if name in ON_POLICY else "transitions")
    assert {*IMPLIED, *UNUSED} <= set(ALGORITHMS.names())
