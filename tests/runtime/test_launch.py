"""Test launch descriptions: the processes that they define, and errors about mistakes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError
from td3_robot.runtime import launch


def test_processes_of_a_training_follow_the_configuration() -> None:
    description = launch.load("train")
    config = configuration.parse({}, ["simulators=3", "evaluation.every=0"])
    assert [item.name for item in launch.expand(description, config)] == [
        "learner",
        "policy",
        "sim-0",
        "sim-1",
        "sim-2",
    ]
    recorded = configuration.parse({"record": True})
    # The recorder starts before all other processes.
    assert next(item.name for item in launch.expand(description, recorded)) == "recorder"
    assert [item.name for item in launch.expand(description, Config())][-1] == "evaluator"
    assert [item.name for item in launch.expand(description, Config()) if item.row.ends_run] == ["learner"]


OLD = """
processes:
  recorder: {module: td3_robot.session.node, when: record.enabled, essential: false}
  learner: {module: td3_robot.learner.node, ends_run: true}
  sim: {module: sims.node, count: simulators}
  evaluator: {module: sims.evaluator, when: evaluation.every}
evaluate: sims.evaluate
"""


def test_module_names_of_version_0_1_0_still_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(OLD)
    for _ in range(2):
        description = launch.load(str(file))
    assert [row.module for row in description.processes.values()] == [
        "td3_robot.recording.node",
        "td3_robot.learner.node",
        "td3_robot_sims.node",
        "td3_robot_sims.evaluator",
    ]
    assert description.evaluate == "td3_robot_sims.evaluate"
    moved = ("td3_robot.session.node", "sims.node", "sims.evaluator", "sims.evaluate")
    assert [record.getMessage() for record in caplog.records] == [
        f"launch description {str(file)!r}: module {old!r} is now {launch.MOVED[old]!r}; please write the new name"
        for old in moved
    ]


def test_moved_modules_exist() -> None:
    assert all(importlib.util.find_spec(module) for module in launch.MOVED.values())
    assert not set(launch.MOVED) & set(launch.MOVED.values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("processes: 3", "Expected `object`"),
        ("processes: {a: {module: x, restat: {}}}\nevaluate: y", "unknown field `restat`"),
        ("processes: {a: {modul: x}}\nevaluate: y", "modul"),
        ("processes: {}", "missing required field `evaluate`"),
        ("a: [1", "launch description"),
        ("processes: {a: {module: nosuch.module, ends_run: true}}\nevaluate: json", "no module 'nosuch.module'"),
        ("processes: {a: {module: json}}\nevaluate: json", "no process has ends_run"),
    ],
)
def test_error_names_the_file_and_the_mistake(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        launch.load(str(file))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_unknown_configuration_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("processes: {a: {module: json, count: robotz, ends_run: true}}\nevaluate: json")
    with pytest.raises(ConfigError, match="'a' names 'robotz'"):
        launch.expand(launch.load(str(file)), Config())


@pytest.mark.parametrize("key", ["task", "policy.frozen"])
def test_count_must_name_a_configuration_key_whose_value_is_a_number(tmp_path: Path, key: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"processes: {{a: {{module: json, count: {key}, ends_run: true}}}}\nevaluate: json")
    text = f"count of process 'a' is '{key}'; allowed: a configuration key whose value is a whole number"
    with pytest.raises(ConfigError, match=text):
        launch.expand(launch.load(str(file)), Config())


def test_error_for_an_unknown_name_suggests_shipped_descriptions() -> None:
    with pytest.raises(ConfigError, match="there is no file 'trian'; similar shipped files in launch: train"):
        launch.load("trian")
