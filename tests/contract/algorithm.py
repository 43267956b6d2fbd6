"""Contract tests for learning algorithms. To test an algorithm, subclass the suite and set ``algorithm``:

class TestMine(AlgorithmContract):
    algorithm = Mine
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from td3_robot.bundle import Bundle
from td3_robot.config.learner import LearnerConfig
from td3_robot.errors import BundleError
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.policy.actor import Actor
from td3_robot.specs import Channel, RobotSpec

O, A, HIDDEN = 5, 3, (24, 16)  # noqa: E741 - observation and action size


class AlgorithmContract:
    """The suite for every algorithm. It gives random transitions even to an algorithm that consumes rollouts."""

    algorithm: type[Algorithm]
    config = LearnerConfig(learning_rate=1e-3, batch_size=32)
    """The configuration of the algorithm. A subclass can replace it. Four updates with it must change the actor."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Use one thread.

        More threads do not speed up small networks. On a busy machine, more threads slow the test down.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def make(self, seed: int = 1, **changes: Any) -> Algorithm:
        return self.algorithm(O, A, HIDDEN, replace(self.config, **changes), seed)

    def batch(self, seed: int) -> Any:
        """Return one batch of random transitions. About a quarter of them end an episode."""
        random = np.random.default_rng(seed)
        buffer = ReplayBuffer(64, O, A, seed)
        observation, following = (random.standard_normal((64, O)).astype(np.float32) for _ in range(2))
        action = random.uniform(-1, 1, (64, A)).astype(np.float32)
        discount = np.where(random.random(64) < 0.25, 0, 0.99).astype(np.float32)
        buffer.add(observation, action, random.standard_normal(64).astype(np.float32), following, discount)
        return buffer.sample(self.config.batch_size)

    def learned(self, updates: int = 4, seed: int = 1, **changes: Any) -> Algorithm:
        made = self.make(seed, **changes)
        for number in range(updates):
            made.learn(self.batch(number))
        return made

    def test_updates_are_counted_and_change_the_policy(self) -> None:
        made = self.make()
        before = made.actor_tensors()
        for number in range(4):
            made.learn(self.batch(number))
            assert made.updates == number + 1
        assert any(not np.array_equal(before[name], tensor) for name, tensor in made.actor_tensors().items())

    def test_equal_seeds_give_equal_bits_and_different_seeds_do_not(self) -> None:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = self.learned()
        assert torch.equal(before, torch.get_rng_state())  # torch's global generator is not used
        torch.manual_seed(2)
        same, other = self.learned(), self.learned(seed=2)
        assert bits(first) == bits(same)
        assert all(
            not np.array_equal(tensor, other.actor_tensors()[name]) for name, tensor in first.actor_tensors().items()
        )

    @pytest.mark.parametrize("before", [0, 1, 3])
    def test_restored_algorithm_continues_bit_for_bit(self, before: int) -> None:
        through, stopped, resumed = self.learned(before), self.learned(before), self.learned(2, seed=9)
        arrays, scalars = stopped.state()
        stopped.learn(self.batch(99))  # must not change the saved state
        resumed.restore(arrays, json.loads(json.dumps(scalars)))
        assert bits(resumed) == bits(through)
        for number in range(4):
            for made in (through, resumed):
                made.learn(self.batch(number))
        assert bits(resumed) == bits(through)
        assert resumed.metrics() == through.metrics()

    def test_damaged_state_is_refused_and_changes_nothing(self) -> None:
        made = self.learned()
        before = bits(made)
        arrays, scalars = self.learned(seed=2).state()
        for name, array in arrays.items():
            others = {key: value for key, value in arrays.items() if key != name}
            for damaged in (others, {**others, name: np.zeros((7, 7, 7), array.dtype)}):
                with pytest.raises(BundleError, match=f"{made.part} state"):
                    made.restore(damaged, scalars)
        for name in scalars:
            with pytest.raises(BundleError, match=f"{made.part} state"):
                made.restore(arrays, {key: value for key, value in scalars.items() if key != name})
        assert bits(made) == before

    def test_policy_can_be_saved_as_a_bundle(self, tmp_path: Path) -> None:
        observations = tuple(Channel(f"o{index}", "m", -5, 5) for index in range(O))
        spec = RobotSpec("Toy", observations, tuple(Channel(f"a{index}", "N", -1, 1) for index in range(A)), 0.02)
        made = self.learned()
        for averaged in (False, True):
            tensors = made.actor_tensors(averaged=averaged)
            Bundle(spec, HIDDEN, tensors).save(tmp_path / "policy.safetensors")
            loaded = Bundle.load(tmp_path / "policy.safetensors")
            assert all(np.array_equal(tensor, loaded.tensors[name]) for name, tensor in tensors.items())
            actions = Actor(loaded)(np.zeros((1, O), np.float32))
            assert np.isfinite(actions).all()

    def test_exported_tensors_are_copies(self) -> None:
        made = self.make()
        tensors = made.actor_tensors()
        before = {name: tensor.copy() for name, tensor in tensors.items()}
        made.learn(self.batch(1))
        made.learn(self.batch(2))
        for tensor in made.state()[0].values():
            tensor.fill(0)
        assert all(np.array_equal(before[name], tensor) for name, tensor in tensors.items())
        assert any(tensor.any() for tensor in made.actor_tensors().values())

    def test_algorithm_can_start_from_a_policy(self) -> None:
        given, made = self.learned().actor_tensors(), self.make(seed=3)
        made.begin_with(given)
        assert all(np.array_equal(given[name], tensor) for name, tensor in made.actor_tensors().items())

    def test_metrics_are_finite_and_include_all_means_and_gauges(self) -> None:
        made = self.make()
        declared = {*made.means, *made.gauges}
        assert made.metrics() == dict.fromkeys(declared, 0.0)
        for number in range(4):
            made.learn(self.batch(number))
        found = made.metrics(clear=False)
        assert declared <= found.keys()
        assert all(math.isfinite(value) for value in found.values())
        assert any(value != 0 for value in found.values())
        assert made.metrics() == found
        assert all(made.metrics().get(name, 0.0) == (found[name] if name in made.gauges else 0) for name in found)

    def test_learning_rate_takes_effect(self) -> None:
        slow, fast = self.make(), self.make()
        start = slow.actor_tensors()
        slow.set_learning_rate(1e-6)
        fast.set_learning_rate(1e-2)
        moved = []
        for made in (slow, fast):
            for number in range(4):
                made.learn(self.batch(number))
            moved.append(
                sum(float(np.abs(tensor - start[name]).sum()) for name, tensor in made.actor_tensors().items())
            )
        assert 0 < moved[0] < 0.01 * moved[1]

    def test_values_are_one_number_for_each_observation(self) -> None:
        made, batch = self.learned(), self.batch(1)
        for action in (batch.action, None):
            values = made.values(batch.observation, action)
            assert values is None or (values.shape == (self.config.batch_size, 1) and bool(values.isfinite().all()))

    def test_td_errors_are_one_number_for_each_transition(self) -> None:
        """Prioritised replay computes its priorities from the TD errors."""
        errors = self.make().learn(self.batch(1))
        assert all(error.shape == (self.config.batch_size, 1) and bool(error.isfinite().all()) for error in errors)


def bits(made: Algorithm) -> dict[str, Any]:
    """Return the state in a form that ``==`` can compare."""
    arrays, scalars = made.state()
    return {name: array.tobytes() for name, array in arrays.items()} | {"scalars": json.dumps(scalars, sort_keys=True)}
