"""Tasks are found by their names. The error for an unknown name lists similar tasks, or all tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from td3_robot_sims import tasks
from td3_robot_sims.evaluate import evaluate

from td3_robot.bench import example
from td3_robot.errors import ConfigError
from td3_robot.specs import RobotSpec


def test_bullet_robots_are_listed() -> None:
    assert tasks.names() == ("Walker2D", "Ant", "HalfCheetah", "Hopper", "Humanoid")


@pytest.mark.parametrize(
    ("task", "observations", "actions"),
    [("Walker2D", 22, 6), ("Ant", 28, 8), ("HalfCheetah", 26, 6), ("Hopper", 15, 3), ("Humanoid", 44, 17)],
)
def test_specifications_have_the_sizes_and_the_period_of_the_robot(task: str, observations: int, actions: int) -> None:
    spec = tasks.spec(task)
    assert (spec.name, spec.observation_size, spec.action_size) == (task, observations, actions)
    assert spec.control_period == 0.0165
    assert all(channel.meaning for channel in spec.observations + spec.actions)
    assert RobotSpec.from_description(spec.describe()) == spec
    environment = tasks.make(task)
    assert environment.spec is spec
    environment.close()


def test_listing_tasks_and_reading_a_specification_imports_no_simulator() -> None:
    code = (
        "import sys; from td3_robot_sims import tasks, evaluator; tasks.names(); tasks.spec('Ant'); "
        "print({'pybullet', 'gymnasium'} & set(sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "set()\n"


@pytest.mark.parametrize(
    ("task", "near"),
    [("Walker3D", "similar ones: Walker2D"), ("ant", "similar ones: Ant"), ("halfcheeta", "similar ones: HalfCheetah")],
)
def test_the_error_for_an_unknown_task_names_similar_tasks(task: str, near: str) -> None:
    for call in (tasks.spec, tasks.make):
        with pytest.raises(ConfigError, match=f"task '{task}' does not exist; {near}"):
            call(task)


@pytest.mark.parametrize("task", ["Hopper", "bullet:Hopper", "gymnasium:Pendulum-v1", "discrete:CartPole-v1"])
def test_an_environment_knows_the_full_name_of_its_task(task: str) -> None:
    environment = tasks.make(task)
    assert environment.task_name == task
    environment.close()


def test_the_name_of_a_task_may_begin_with_its_backend() -> None:
    assert tasks.spec("bullet:Ant") == tasks.spec("Ant")
    with pytest.raises(ConfigError, match="backend of task 'gymnasum:X' is 'gymnasum'; did you mean 'gymnasium'"):
        tasks.spec("gymnasum:X")


def test_the_error_lists_all_tasks_if_none_is_similar() -> None:
    with pytest.raises(ConfigError, match="Walker2D, Ant, HalfCheetah, Hopper, Humanoid"):
        tasks.make("x")


def test_the_task_in_a_policy_file_imports_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_task.py").write_text("raise SystemExit('this code ran')")
    monkeypatch.syspath_prepend(tmp_path)
    policy = example.bundle()
    policy.provenance["task"] = "gymnasium:evil_task:Evil-v0"
    policy.save(tmp_path / "policy.safetensors")
    with pytest.raises(ConfigError, match="would import module 'evil_task'; to allow this: task='gymnasium"):
        evaluate(tmp_path / "policy.safetensors")
    assert "evil_task" not in sys.modules
