"""Each mistake of an algorithm gives one line that names the algorithm and the broken rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from td3_robot.config.learner import LearnerConfig
from td3_robot.errors import ConfigError
from td3_robot.learner import contract
from td3_robot.learner.algorithms.a2c import A2C
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.table import ALGORITHMS
from td3_robot.learner.algorithms.td3 import TD3
from td3_robot.specs import Channel, RobotSpec
from tests.contract.algorithm import bits
from tests.contract.sign_learner import SignLearner
from tests.learner.td3_cases import A, B, O, batches

HIDDEN = (24, 16)
SPEC = RobotSpec(
    "Toy",
    tuple(Channel(f"o{index}", "m", -5, 5) for index in range(O)),
    tuple(Channel(f"a{index}", "N", -2, 2) for index in range(A)),
    0.02,
)


def config(**changes: Any) -> LearnerConfig:
    return LearnerConfig(algorithm="mine", **changes)


def made(kind: type[Algorithm], **changes: Any) -> Algorithm:
    return kind(O, A, HIDDEN, config(**changes), seed=1)


class NoBuild(Algorithm):
    """A class without ``build``."""

    def update(self, batch: Any) -> Any:
        """Do nothing."""


class NoUpdate(Algorithm):
    """A class without ``update``."""

    def build(self) -> None:
        """Create nothing."""


class Misspelt(TD3):
    consumes = "rollout"  # type: ignore[assignment]


class NoActor(SignLearner):
    def build(self) -> None:
        """Create nothing."""


class Narrow(SignLearner):
    def build(self) -> None:
        """Create an actor whose hidden layers are not those of the configuration."""
        self.actor = self.network(nn.Sequential(nn.Linear(O, 7), nn.ReLU(), nn.Linear(7, A), nn.Tanh()))  # type: ignore[assignment]


class Normalised(SignLearner):
    def build(self) -> None:
        """Create an actor with LayerNorm, which a policy server does not compute."""
        first, second = HIDDEN
        self.actor = self.network(  # type: ignore[assignment]
            nn.Sequential(
                nn.Linear(O, first), nn.LayerNorm(first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(),
                nn.Linear(second, A), nn.Tanh(),
            )
        )  # fmt: skip


class NoModule(SignLearner):
    def policy(self, *, averaged: bool) -> Any:
        """Return the wrong object."""
        return f"policy, averaged {averaged}"


class WideValues(SignLearner):
    def values(self, observation: Any, action: Any = None) -> Any:
        """Return three values for each observation."""
        del action
        return torch.zeros(len(observation), 3)


class TextValues(SignLearner):
    def values(self, observation: Any, action: Any = None) -> Any:
        """Return no tensor."""
        return f"{observation} {action}"[:6]


class TextProgress(SignLearner):
    progress = "half"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (int, "td3_robot.learner.algorithms.base.Algorithm"),
        (5, "td3_robot.learner.algorithms.base.Algorithm"),
        (NoBuild, "NoBuild has no method build"),
        (NoUpdate, "NoUpdate has no method update"),
        (Misspelt, "Misspelt.consumes is 'rollout'; allowed: transitions, rollouts"),
    ],
)
def test_a_wrong_class_is_refused(kind: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALGORITHMS, "load", lambda name: {"mine": kind}[name])
    monkeypatch.setattr(ALGORITHMS, "rows", {"mine": "my_package:Mine"})
    with pytest.raises(ConfigError) as error:
        contract.load("mine")
    assert str(error.value).startswith("learner.algorithm is 'mine': ")
    assert str(error.value).endswith(problem)


@pytest.mark.parametrize("kind", [TD3, A2C, SignLearner])
def test_a_sound_algorithm_passes_and_does_not_change(kind: type[Algorithm]) -> None:
    algorithm = made(kind)
    before = torch.get_rng_state(), algorithm.random.get_state()
    contract.check(algorithm, SPEC)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], algorithm.random.get_state())


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (NoActor, "NoActor.build sets no attribute actor"),
        (
            Narrow,
            rf"layers are actor.0.weight \[7, {O}\], .*; needed by network.hidden: actor.0.weight \[24, {O}\]",
        ),
        (Normalised, "the policy is no perceptron with ReLU after its hidden layers and tanh after its last layer"),
        (NoModule, "NoModule.policy returned policy, averaged False; allowed: a torch.nn.Module"),
        (WideValues, r"WideValues.values returned the shape \[8, 3\] for 8 observations; needed: \[8, 1\]"),
        (TextValues, "TextValues.values returned tensor for 8 observations"),
        (TextProgress, "TextProgress.progress is half; allowed: None, or a number from 0 to 1"),
    ],
)
def test_an_algorithm_that_breaks_a_rule_is_refused(kind: type[Algorithm], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^learner.algorithm is 'mine': .*{problem}"):
        contract.check(made(kind), SPEC)


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        (None, "update returned None; allowed: a map with the metrics by name"),
        (
            {"loss": torch.zeros(3)},
            r"update returned the metric 'loss' with the value a tensor of shape \[3\]; allowed",
        ),
        ({"loss": "low"}, "update returned the metric 'loss' with the value low; allowed: names with one number each"),
        ({5: 0.5}, "update returned the metric 5 with the value 0.5; allowed: names with one number each"),
    ],
)
def test_wrong_metrics_are_refused(metrics: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = made(SignLearner)
    monkeypatch.setattr(algorithm, "update", lambda _: metrics)
    with pytest.raises(ConfigError, match=f"^learner.algorithm is 'mine': {problem}"):
        algorithm.learn(batches(1, seed=1)[0])


def test_metrics_can_be_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = made(SignLearner)
    for loss in (1, torch.tensor([2.0]), 6.0):
        monkeypatch.setattr(algorithm, "update", lambda _, loss=loss: {"loss": loss})
        algorithm.learn(batches(1, seed=1)[0])
    assert algorithm.metrics() == {"loss": 3.0}  # (1 + 2 + 6) / 3


def test_prioritised_replay_needs_one_error_for_each_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = made(SignLearner, replay="lap", critic_loss="huber")
    monkeypatch.setattr(algorithm, "td_errors", [torch.zeros(B)])
    with pytest.raises(ConfigError, match=rf"td_errors has an array of shape \[{B}\]; needed for 'lap': \[{B}, 1\]$"):
        algorithm.learn(batches(1, seed=1)[0])


class Twice(SignLearner):
    """An algorithm with second names for its networks and optimisers, and with a tensor of one update."""

    def build(self) -> None:
        """Create the attributes of SignLearner, and lists with their parts."""
        super().build()
        self.optimisers = [self.optimiser]
        self.clipped = [*self.actor.parameters(), self.scale]
        self.td_errors = (2 * self.scale,)  # requires a gradient, but is no parameter


def test_an_object_with_two_names_is_saved_once_and_restored() -> None:
    once, twice, restored = made(SignLearner), made(Twice), made(Twice)
    for number, batch in enumerate(batches(3, seed=1)):
        assert number == once.updates == twice.updates
        once.learn(batch)
        twice.learn(batch)
    assert once.state()[0].keys() == twice.state()[0].keys()
    assert once.sizes() == twice.sizes()
    restored.restore(*once.state())
    for algorithm in (twice, restored):
        algorithm.learn(batches(1, seed=2)[0])
    assert bits(twice) == bits(restored)


def test_the_check_does_not_change_the_random_numbers() -> None:
    class Sampled(SignLearner):
        def values(self, observation: Any, action: Any = None) -> Any:
            """Return random values."""
            del action
            return torch.rand(len(observation), 1, generator=self.random)

    algorithm = made(Sampled)
    before = algorithm.random.get_state()
    contract.check(algorithm, SPEC)
    assert torch.equal(before, algorithm.random.get_state())


def test_an_optimiser_with_values_that_are_no_tensors_is_refused() -> None:
    algorithm = made(SignLearner)
    algorithm.optimiser = torch.optim.LBFGS(algorithm.actor.parameters())  # type: ignore[assignment]
    loss = algorithm.actor(torch.ones(1, O)).sum()
    algorithm.optimiser.step(lambda: loss)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="'optimiser' is LBFGS, whose state 'func_evals' a checkpoint cannot hold"):
        algorithm.state()
