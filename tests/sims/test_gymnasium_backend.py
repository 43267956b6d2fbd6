"""Gymnasium's tasks as environments of this project."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from td3_robot_sims import tasks

from td3_robot.cli.main import main
from td3_robot.errors import EXIT_USAGE, ConfigError, NodeError
from td3_robot.specs import Channel, RobotSpec

needs_box2d = pytest.mark.skipif(importlib.util.find_spec("Box2D") is None, reason="Box2D is not installed")
TASKS = ["Pendulum-v1", "MountainCarContinuous-v0", pytest.param("LunarLanderContinuous-v3", marks=needs_box2d)]


class Asymmetric(gymnasium.Env[np.ndarray[Any, Any], np.ndarray[Any, Any]]):
    """An environment with reward terms and with different bounds in each dimension. It has no rate and no pictures."""

    observation_space = spaces.Box(np.array([-np.inf, 0.0], np.float32), np.array([np.inf, 3.0], np.float32))
    action_space = spaces.Box(np.array([-1.0, 2.0], np.float32), np.array([5.0, 2.5], np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
        super().reset(seed=seed)
        return np.array([self.np_random.uniform(), 1.0], np.float32), {}

    def step(self, action: Any) -> Any:
        terms = {"reward_near": 1.5, "reward_far": -0.5, "reward_vector": np.ones(2), "other": 3.0}
        observation = np.array([action[0], self.np_random.uniform()], np.float32)
        action[:] = 0  # some tasks write into their argument
        return observation, 1.0, bool(observation[0] > 4), False, terms


for name, keys in {"Asymmetric-v0": {"max_episode_steps": 4}, "Endless-v0": {}}.items():
    gymnasium.register(f"td3_robot_tests/{name}", entry_point=Asymmetric, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", TASKS)
def test_numbers_equal_those_of_gymnasium(task: str) -> None:
    # Call tasks.make() before gymnasium.make(). The first call imports Box2D, which warns; only tasks.make() ignores
    # these warnings.
    ours = tasks.make(f"gymnasium:{task}")
    original = gymnasium.make(task)
    random = np.random.default_rng(0)
    for episode in range(3):
        seed = 11 if episode == 0 else None
        theirs, mine = original.reset(seed=seed)[0], ours.reset(seed)
        np.testing.assert_array_equal(theirs, mine)
        outcome = None
        while outcome is None or not (outcome.terminated or outcome.truncated):
            action = random.uniform(ours.spec.action_low, ours.spec.action_high).astype(np.float32)
            theirs, reward, terminated, truncated, _ = original.step(action.copy())
            outcome = ours.step(action)
            np.testing.assert_array_equal(theirs, outcome.observation)
            assert (float(reward), terminated, truncated) == outcome[1:]
            assert sum(ours.reward_terms().values()) == outcome.reward
    original.close()
    ours.close()


def test_specifications_have_the_limits_and_the_period_of_the_task() -> None:
    pendulum = tasks.spec("gymnasium:Pendulum-v1")
    assert (pendulum.action_low.tolist(), pendulum.action_high.tolist()) == ([-2.0], [2.0])
    assert pendulum.control_period == 0.05, "the period must be the task's dt, not 1/30 s from the rendering rate"
    assert tasks.spec("gymnasium:MountainCarContinuous-v0").control_period == 1 / 30
    assert pendulum.name == "gymnasium:Pendulum-v1"
    assert tasks.spec("gymnasium:Pendulum-v1") is pendulum


@needs_box2d
def test_the_specification_of_lunar_lander_has_the_right_sizes_and_period() -> None:
    lander = tasks.spec("gymnasium:LunarLanderContinuous-v3")
    assert (lander.observation_size, lander.action_size, lander.control_period) == (8, 2, 1 / 50)


def test_a_specification_has_the_bounds_of_each_dimension_and_the_default_rate() -> None:
    spec = tasks.spec("gymnasium:td3_robot_tests/Asymmetric-v0")
    assert spec.action_low.tolist() == [-1, 2]
    assert spec.action_high.tolist() == [5, 2.5]
    assert [(c.low, c.high) for c in spec.observations] == [(-math.inf, math.inf), (0, 3)]
    assert spec.control_period == 1 / 50


def test_time_limit_and_failure_are_distinguished() -> None:
    task = tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0", seed=1)
    assert task.time_limit == 4
    low, high = np.array([0, 2], np.float32), np.array([5, 2], np.float32)
    task.reset()
    assert [task.step(low)[2:] for _ in range(4)] == [(False, False)] * 3 + [(False, True)]
    task.reset()
    assert task.step(high)[2:] == (True, False)
    task.reset()
    for _ in range(3):
        task.step(low)
    assert task.step(high)[2:] == (True, True)
    assert high.tolist() == [5, 2], "the caller's action was changed"
    task.close()


def test_reward_terms_come_from_info() -> None:
    task = tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0", seed=1)
    task.reset()
    task.step(np.array([0, 2], np.float32))
    assert task.reward_terms() == {"reward_near": 1.5, "reward_far": -0.5}
    task.close()


def test_endless_episodes_continue_and_can_be_saved() -> None:
    task, other = (tasks.make("gymnasium:td3_robot_tests/Endless-v0", seed) for seed in (1, 2))
    assert task.time_limit == 0
    task.reset()
    action = np.array([0, 2], np.float32)
    for _ in range(2500):
        assert task.step(action)[2:] == (False, False)
    other.restore_state(task.save_state())
    np.testing.assert_array_equal(task.step(action).observation, other.step(action).observation)
    task.close()
    other.close()


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("CartPole-v1", r"Discrete\(2\) as actions; supported: vectors"),
        ("Blackjack-v1", "Discrete.* as actions"),
        ("Nothing-v7", "does not exist"),
        ("no_such_module:X-v0", "cannot be imported: ModuleNotFoundError"),
        ("Pendulum-v9", "does not exist"),
        ("", "cannot be made"),
        pytest.param("CarRacing-v3", "images as observations; supported: ", marks=needs_box2d),
    ],
)
def test_the_error_for_a_refused_task_names_the_reason_in_one_line(task: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        tasks.make(f"gymnasium:{task}")
    assert "\n" not in str(refused.value)


def test_an_exit_in_the_module_of_a_task_does_not_end_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaving_task.py").write_text("import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    task = "gymnasium:leaving_task:Leaving-v0"
    assert main(["bundle", "verify", "walker2d", "--task", task]) == EXIT_USAGE
    problem = f"task '{task}': module 'leaving_task' cannot be imported: SystemExit: 0"
    assert capsys.readouterr().err == f"td3-robot bundle: {problem}\n"


@pytest.mark.parametrize("error", [ValueError, OSError, KeyError, AssertionError, SystemExit])
def test_an_exception_while_a_task_is_made_gives_one_line_of_error(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(_: Asymmetric) -> None:
        raise error("no\nmotor")

    monkeypatch.setattr(Asymmetric, "__init__", fail)
    with pytest.raises(ConfigError) as refused:
        tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0")
    assert str(refused.value).startswith(
        f"task 'gymnasium:td3_robot_tests/Asymmetric-v0' cannot be made: {error.__name__}: "
    )
    assert "\n" not in str(refused.value)


OBSERVATION = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (OBSERVATION, "reset() returned an array of shape (2,); it must return 2 values: observation, info"),
        ((OBSERVATION, {}, {}), "reset() returned 3 values; it must return 2 values: observation, info"),
        ((np.zeros(3), {}), "the observation of reset() has shape (3,); it must be (2,)"),
        ((0.5, {}), "the observation of reset() has shape (); it must be (2,)"),
        (
            ([[1.0], [2.0, 3.0]], {}),
            "the observation of reset() is [[1.0], [2.0, 3.0]]; it must be numbers of shape (2,)",
        ),
    ],
)
def test_the_error_says_what_is_wrong_with_the_result_of_reset(
    monkeypatch: pytest.MonkeyPatch, result: Any, text: str
) -> None:
    monkeypatch.setattr(Asymmetric, "reset", lambda *_, **__: result)
    task = tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0", seed=1)
    with pytest.raises(NodeError, match=f"^task 'gymnasium:td3_robot_tests/Asymmetric-v0': {re.escape(text)}$"):
        task.reset()
    task.close()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "step() returned None; it must return 5 values: observation, reward, terminated, truncated, info"),
        (
            (OBSERVATION, 1.0, False, {}),
            "step() returned 4 values; it must return 5 values: observation, reward, terminated, truncated, info",
        ),
        ((np.zeros(1), 1.0, False, False, {}), "the observation of step() has shape (1,); it must be (2,)"),
        (("left", 1.0, False, False, {}), "the observation of step() is 'left'; it must be numbers of shape (2,)"),
        ((OBSERVATION, None, False, False, {}), "the field 'reward' of step() is None; it must be a number"),
        (
            (OBSERVATION, np.ones(2), False, False, {}),
            "the field 'reward' of step() is an array of shape (2,); it must be a number",
        ),
        (
            (OBSERVATION, 1.0, np.ones(2), False, {}),
            "the field 'terminated' of step() is an array of shape (2,); it must be True or False",
        ),
        (
            (OBSERVATION, 1.0, False, np.ones(2), {}),
            "the field 'truncated' of step() is an array of shape (2,); it must be True or False",
        ),
        (
            (OBSERVATION, 1.0, False, False, None),
            "the field 'info' of step() is None; it must be a map from names to values",
        ),
        (
            (OBSERVATION, 1.0, False, False, {"reward_far": "low\nvalue"}),
            "the field info['reward_far'] of step() is 'low\\nvalue'; it must be a number",
        ),
        (
            (OBSERVATION, 1.0, False, False, {"reward_far": [[1.0], [2.0, 3.0]]}),
            "the field info['reward_far'] of step() is [[1.0], [2.0, 3.0]]; it must be a number",
        ),
    ],
)
def test_the_error_says_what_is_wrong_with_the_result_of_step(
    monkeypatch: pytest.MonkeyPatch, result: Any, text: str
) -> None:
    monkeypatch.setattr(Asymmetric, "step", lambda *_: result)
    task = tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0", seed=1)
    task.reset()
    with pytest.raises(NodeError, match=f"^task 'gymnasium:td3_robot_tests/Asymmetric-v0': {re.escape(text)}$"):
        task.step(np.array([0, 2], np.float32))
    task.close()


@pytest.mark.parametrize("shape", [(2, 2), ()])
@pytest.mark.parametrize("kind", ["observation", "action"])
def test_a_space_must_have_one_dimension(monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(Asymmetric, f"{kind}_space", spaces.Box(-1, 1, shape, np.float32))
    words = re.escape(f"has {kind}s of shape {shape}; the shape must have one dimension")
    with pytest.raises(ConfigError, match=words):
        tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0")


def test_an_environment_without_spaces_is_refused() -> None:
    class Bare(gymnasium.Env[Any, Any]): ...

    gymnasium.register("td3_robot_tests/Bare-v0", entry_point=Bare)  # type: ignore[arg-type]
    for kind, words in (("gymnasium", "has None as actions; supported: "), ("discrete", "has actions None; ")):
        with pytest.raises(ConfigError, match=words):
            tasks.make(f"{kind}:td3_robot_tests/Bare-v0")


@pytest.mark.skipif(importlib.util.find_spec("pygame") is None, reason="pygame is not installed")
def test_pictures_have_the_requested_size() -> None:
    task = tasks.make("gymnasium:Pendulum-v1", seed=1)
    task.reset()
    picture = task.render(80, 60)
    assert (picture.shape, picture.dtype) == ((60, 80, 3), np.uint8)
    assert picture.min() < picture.max()
    task.close()


def test_without_pygame_the_error_names_pygame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)  # an import of pygame then fails
    task = tasks.make("gymnasium:Pendulum-v1", seed=1)
    task.reset()
    with pytest.raises(ConfigError, match="cannot be drawn: pygame"):
        task.render()
    task.close()


def test_a_task_that_draws_only_in_a_window_has_no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asymmetric, "metadata", {"render_modes": ["human"]})
    monkeypatch.setattr(Asymmetric, "render", lambda _: None)
    monkeypatch.setattr(Asymmetric, "robot_spec", ROBOT, raising=False)  # the error names the task, not the robot
    task = tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0", seed=1)
    task.reset()
    with pytest.raises(ConfigError) as refused:
        task.render()
    assert str(refused.value) == (
        "task 'gymnasium:td3_robot_tests/Asymmetric-v0' cannot be drawn: its environment has no pictures; "
        "its metadata['render_modes'] must contain 'rgb_array'"
    )
    task.close()


def test_a_task_whose_render_returns_nothing_has_no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asymmetric, "metadata", {"render_modes": ["rgb_array"]})
    monkeypatch.setattr(
        Asymmetric, "__init__", lambda self, render_mode=None: setattr(self, "render_mode", render_mode)
    )
    monkeypatch.setattr(Asymmetric, "render", lambda _: None)
    task = tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0", seed=1)
    task.reset()
    with pytest.raises(ConfigError, match=r"has no pictures; its render\(\) returned None in the mode 'rgb_array'"):
        task.render()
    task.close()


@pytest.mark.parametrize(
    ("task", "identity"), [("gymnasium:m:Pendulum-v1", "Pendulum-v1"), ("discrete:CartPole-v1", None)]
)
def test_only_a_continuous_task_has_a_gymnasium_id(task: str, identity: str | None) -> None:
    """``discrete:CartPole-v1`` has no ID, because its actions are scores. Gymnasium's CartPole-v1 takes integers."""
    backend, name = tasks.find(task)
    assert backend.gymnasium_id(name) == identity


def test_a_discrete_task_executes_the_action_with_the_highest_score() -> None:
    environment = tasks.make("discrete:CartPole-v1", 0)
    assert [channel.name for channel in environment.spec.actions] == ["score_0", "score_1"]
    assert (environment.spec.actions[0].low, environment.spec.actions[0].high) == (-10.0, 10.0)
    environment.reset(3)
    right = environment.step(np.float32([-9.0, -8.0])).observation
    environment.reset(3)
    left = environment.step(np.float32([0.5, 0.5])).observation  # the first of two equal scores wins
    assert right[1] > 0 > left[1]  # the cart's velocity
    environment.close()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("discrete:Pendulum-v1", "the backend 'discrete' supports only Discrete actions"),
        ("discrete:Nothing-v0", "does not exist"),
        ("discrete:os:system-v0", "does not exist"),
    ],
)
def test_the_discrete_backend_refuses_continuous_and_unknown_tasks(task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tasks.make(task)


ROBOT = RobotSpec(
    "Cart",
    (Channel("speed", "m/s", -math.inf, math.inf), Channel("height", "m", 0.0, 3.0)),
    (Channel("force", "N", -1.0, 5.0), Channel("tilt", "rad", 2.0, 2.5)),
    0.04,
)


@pytest.mark.parametrize("described", [ROBOT, ROBOT.describe()])
def test_an_environment_describes_its_robot(monkeypatch: pytest.MonkeyPatch, described: Any) -> None:
    monkeypatch.setattr(Asymmetric, "robot_spec", described, raising=False)
    environment = tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0")
    assert environment.spec == ROBOT
    assert environment.reset(1).shape == (2,)
    environment.close()


@pytest.mark.parametrize(
    ("described", "text"),
    [
        (3, "robot_spec is int; it must be a RobotSpec or a map"),
        ({"name": "x"}, "robot specification: Object missing required field `observations`"),
        (replace(ROBOT, actions=ROBOT.actions[:1]), "robot_spec has 1 actions; the task's space has 2 numbers"),
        (
            replace(ROBOT, actions=(Channel("force", "N", -1.0, 4.0), ROBOT.actions[1])),
            "robot_spec gives 'force' the limits -1 and 4; the task's space gives -1 and 5",
        ),
    ],
)
def test_the_error_says_what_is_wrong_with_a_robot_spec(
    monkeypatch: pytest.MonkeyPatch, described: Any, text: str
) -> None:
    monkeypatch.setattr(Asymmetric, "robot_spec", described, raising=False)
    with pytest.raises(ConfigError, match=re.escape(text)):
        tasks.make("gymnasium:td3_robot_tests/Asymmetric-v0")
