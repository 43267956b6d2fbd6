"""Contract tests for simulator backends. To test a backend, subclass the suite and list the full names of its tasks:

@pytest.mark.parametrize("task", ["toy:Point"])
class TestToy(SimulatorBackendContract): ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.vector_env import VectorEnvironment

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import BundleError, ConfigError
from td3_robot.messages import Phase
from td3_robot.specs import Float32, RobotSpec

Make = Callable[..., Environment]
STEPS = 60


def actions(spec: RobotSpec, seed: int) -> Iterator[Float32]:
    """Yield random actions endlessly, from the whole range of each action channel."""
    random = np.random.default_rng(seed)
    while True:
        yield random.uniform(spec.action_low, spec.action_high).astype(np.float32)


def trace(environment: Environment, steps: int, seed: int) -> list[Any]:
    """Apply ``steps`` random actions, over several episodes if needed.

    Return lists and numbers: all outcomes and reward terms, and the first observation of each new episode.
    """
    lines: list[Any] = []
    for _, action in zip(range(steps), actions(environment.spec, seed), strict=False):
        outcome = environment.step(action)
        lines.append([outcome.observation.tolist(), *outcome[1:], environment.reward_terms()])
        if outcome.terminated or outcome.truncated:
            lines.append(environment.reset().tolist())
    return lines


class SimulatorBackendContract:
    """Rules for every simulator backend. ``task`` is the full name of a task."""

    @pytest.fixture
    def make(self, task: str) -> Iterator[Make]:
        """Makes environments of the task and closes them after the test."""
        made: list[Environment] = []

        def make(seed: int | None = 1, randomization: RandomizationConfig | None = None) -> Environment:
            made.append(tasks.make(task, seed, randomization))
            return made[-1]

        yield make
        for environment in made:
            environment.close()

    def test_environment_has_the_specification_of_its_task(self, task: str, make: Make) -> None:
        spec = tasks.spec(task)
        assert make().spec == spec
        assert RobotSpec.from_description(spec.describe()) == spec
        assert spec.control_period > 0
        assert np.isfinite([spec.action_low, spec.action_high]).all()

    def test_observations_and_rewards_fit_the_specification(self, make: Make) -> None:
        environment = make()
        low, high = (
            np.array([getattr(channel, end) for channel in environment.spec.observations], np.float32)
            for end in ("low", "high")
        )
        observation = environment.reset()
        for _, action in zip(range(STEPS), actions(environment.spec, 2), strict=False):
            assert (observation.shape, observation.dtype) == ((environment.spec.observation_size,), np.float32)
            assert np.isfinite(observation).all()
            assert (low <= observation).all()
            assert (observation <= high).all()
            outcome = environment.step(action)
            assert np.isfinite(outcome.reward)
            assert {type(value) for value in outcome[2:]} == {bool}
            observation = outcome.observation if environment_runs(outcome) else environment.reset()

    def test_equal_seeds_give_equal_bits_and_different_seeds_do_not(self, make: Make) -> None:
        starts = [make(seed).reset().tolist() for seed in (1, 1, 2)]
        assert starts[0] == starts[1] != starts[2]
        one, same = make(3), make(3)
        assert one.reset().tolist() == same.reset().tolist()
        assert trace(one, STEPS, 4) == trace(same, STEPS, 4)
        assert make(None).reset().tolist() != make(None).reset().tolist()

    def test_reset_with_a_seed_restarts_the_random_stream(self, make: Make) -> None:
        environment = make(1)
        first = environment.reset(7).tolist()
        episode = trace(environment, STEPS, 4)
        assert environment.reset().tolist() != first
        assert environment.reset(7).tolist() == first
        assert trace(environment, STEPS, 4) == episode

    def test_actions_are_checked_and_not_changed(self, make: Make) -> None:
        environment = make()
        environment.reset()
        size = environment.spec.action_size
        for wrong in (np.zeros(size + 1, np.float32), np.zeros((1, size), np.float32)):
            with pytest.raises(ValueError, match="has shape"):
                environment.step(wrong)
        for number in (np.nan, np.inf, 3e38):  # 3e38 is finite, but its square exceeds the largest float32
            with pytest.raises(ValueError, match="is not finite"):
                environment.step(np.full(size, number, np.float32))
        assert len(environment.save_state()["actions"]) == 0, "a refused action was stored"
        action = environment.spec.action_high.copy()
        environment.step(action)
        assert action.tolist() == environment.spec.action_high.tolist()

    def test_observation_is_a_copy_for_the_caller(self, make: Make) -> None:
        environment = make()
        environment.reset()[:] = 1e9
        saved = environment.save_state()["observation"].copy()
        assert (saved != 1e9).all()
        outcome = environment.step(next(actions(environment.spec, 1)))
        kept = outcome.observation.copy()
        outcome.observation[:] = 1e9
        assert environment.save_state()["observation"].tolist() == kept.tolist()

    def test_steps_need_a_running_episode(self, make: Make) -> None:
        environment = make()
        action = next(actions(environment.spec, 1))
        with pytest.raises(RuntimeError, match="reset"):
            environment.step(action)
        environment.time_limit = 1
        environment.reset()
        environment.step(action)
        with pytest.raises(RuntimeError, match="reset"):
            environment.step(action)
        environment.reset()
        environment.close()
        environment.close()
        with pytest.raises(RuntimeError, match="reset"):
            environment.step(action)

    def test_time_limit_truncates_the_episode(self, make: Make) -> None:
        environment = make()
        environment.time_limit = 3
        for _ in range(3):
            environment.reset()
            for length, action in zip(range(1, 4), actions(environment.spec, 5), strict=False):
                outcome = environment.step(action)
                assert outcome.truncated == (length == 3)
                if not environment_runs(outcome):
                    break

    def test_reward_terms_add_up(self, make: Make) -> None:
        environment = make()
        environment.reset()
        assert environment.reward_terms() == {}
        outcome = environment.step(next(actions(environment.spec, 1)))
        assert sum(environment.reward_terms().values()) == pytest.approx(outcome.reward, rel=1e-6)
        environment.reset()
        assert environment.reward_terms() == {}

    def test_saved_episode_continues_bit_for_bit(self, make: Make) -> None:
        original, other = make(5), make(6)
        for steps in (0, 1, 37):
            original.reset()
            trace(original, steps, 2)
            state = original.save_state()
            expected = trace(original, STEPS, 3)
            other.reset()
            other.restore_state(state)
            assert trace(other, STEPS, 3) == expected

    def test_state_saved_before_the_first_reset_holds_the_random_stream(self, make: Make) -> None:
        original, other = make(5), make(6)
        other.reset()
        other.restore_state(original.save_state())
        assert original.reset().tolist() == other.reset().tolist()

    def test_invalid_saved_state_is_refused(self, make: Make) -> None:
        environment = make()
        environment.reset()
        trace(environment, 3, 1)
        good = environment.save_state()
        for part, value in (
            ("random", np.zeros(6, np.uint64)),
            ("actions", np.zeros((3, environment.spec.action_size + 1), np.float32)),
            ("observation", good["observation"] + np.float32(1)),
        ):
            with pytest.raises(BundleError, match="saved state"):
                environment.restore_state({**good, part: value})
        environment.restore_state(good)

    def test_vector_of_robots_equals_single_robots(self, task: str, make: Make) -> None:
        seeds: list[int] = []

        def made(seed: int) -> Environment:
            seeds.append(seed)
            return tasks.make(task, seed)

        vector = VectorEnvironment(made, 3, 1, "sim-0", 0, threads=2)
        singles = [make(seed) for seed in seeds]
        draws = actions(vector.spec, 8)
        phases = [Phase.TRUNCATED] * 3
        for _ in range(STEPS):
            action = np.array([next(draws) for _ in singles])
            vector.step(action)
            for robot, single in enumerate(singles):
                if phases[robot] >= Phase.TERMINATED:
                    expected, reward, phases[robot] = single.reset(), 0.0, Phase.FIRST
                else:
                    expected, reward, terminated, truncated = single.step(action[robot])
                    phases[robot] = Phase.TERMINATED if terminated else Phase.TRUNCATED if truncated else Phase.MID
                assert vector.observation[robot].tolist() == expected.tolist()
                assert vector.reward[robot] == np.float32(reward)
            assert vector.phase.tolist() == phases
        vector.close()

    def test_every_backend_supports_action_latency(self, make: Make) -> None:
        config = RandomizationConfig(action_latency=(1, 3))
        one, same, plain = make(3, config), make(3, config), make(3)
        assert one.reset().tolist() == same.reset().tolist()
        assert one.world == same.world
        assert 1 <= one.world["action_latency"] <= 3
        assert plain.world == {}
        assert trace(one, STEPS, 4) == trace(same, STEPS, 4)

    def test_unsupported_randomization_is_refused(self, task: str) -> None:
        config = RandomizationConfig(mass=(0.5, 2.0))
        allowed = tasks.find(task)[0].randomization
        if allowed is None or "mass" in allowed:
            assert tasks.check(task, config) == tasks.spec(task)
            return
        for call in (lambda: tasks.check(task, config), lambda: tasks.make(task, 1, config)):
            with pytest.raises(
                ConfigError, match=r"randomization.mass is \[0.5, 2.0\].*of the task supports only the keys: \w+"
            ):
                call()

    def test_picture_has_the_requested_size_or_is_refused(self, make: Make) -> None:
        environment = make()
        environment.reset()
        before = environment.save_state()["observation"].tolist()
        with contextlib.suppress(ConfigError):
            picture = environment.render(80, 60)
            assert (picture.shape, picture.dtype) == ((60, 80, 3), np.uint8)
        assert environment.save_state()["observation"].tolist() == before

    def test_unknown_task_gives_one_line_of_error(self, task: str) -> None:
        kind = tasks.find(task)[0].kind
        for call in (tasks.spec, tasks.make):
            with pytest.raises(ConfigError, match="NoSuchTask") as refused:
                call(f"{kind}:NoSuchTask-v0")
            assert "\n" not in str(refused.value)

    def test_listed_names_exist(self, task: str) -> None:
        backend, _ = tasks.find(task)
        assert backend.packages
        for name in backend.names():
            assert tasks.spec(f"{backend.kind}:{name}") == backend.spec(name)


def environment_runs(outcome: Any) -> bool:
    """Whether the episode continues after this outcome."""
    return not (outcome.terminated or outcome.truncated)
