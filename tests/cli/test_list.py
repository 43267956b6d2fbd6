"""``td3-robot list`` prints the names that a user can choose."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from td3_robot_sims import tasks

from td3_robot.cli.main import main
from td3_robot.config import reference
from td3_robot.config.schema import Config


def rows(what: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    assert main(["list", what, "--json"]) == 0
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)["rows"]
    assert main(["list", what]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [key.upper() for key in found[0]]
    assert len(lines) == len(found)
    return found


def test_list_configs(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["config"]: row for row in rows("configs", capsys)}
    assert found["walker2d_fast"]["task"] == "Walker2D"
    assert found["walker2d_fast"]["steps"] == "100,000"
    assert found["walker2d_fast"]["description"].startswith("Walker2D in PyBullet, 100,000 steps")


def test_list_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["task"]: row for row in rows("tasks", capsys)}
    assert (found["Walker2D"]["observations"], found["Walker2D"]["actions"]) == ("22", "6")
    assert found["Walker2D"]["description"] == "a walking robot in PyBullet"
    assert "gymnasium:ID" in found


def test_list_tasks_of_an_installed_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tasks.BACKENDS.rows, "toy", "tests.contract.point_mass:PointMassBackend")
    described = {row["task"]: row["description"] for row in rows("tasks", capsys) if row["task"].startswith("toy:")}
    assert set(described.values()) == {"a task of the backend toy"}


def test_text_that_a_backend_prints_is_not_part_of_the_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = "print('engine 7')\nfrom tests.contract.point_mass import PointMassBackend"
    (tmp_path / "talking_backend.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tasks.BACKENDS.rows, "talking", "talking_backend:PointMassBackend")
    assert main(["list", "tasks", "--json"]) == 0
    captured = capsys.readouterr()
    assert "talking:Point" in [row["task"] for row in json.loads(captured.out)["rows"]]
    assert captured.err == "engine 7\n"


def test_list_policies(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["policy"]: row for row in rows("policies", capsys)}
    assert found["walker2d"]["task"] == "Walker2D"
    assert found["ant"]["task"] == "Ant"


def test_list_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["algorithm"] for row in rows("algorithms", capsys)] == ["td3", "ddpg", "a2c"]


def test_list_keys_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["name"]: row for row in rows("keys", capsys)}

    def leaves(section: msgspec.Struct, prefix: str = "") -> list[str]:
        names = []
        for name in section.__struct_fields__:
            value = getattr(section, name)
            names += leaves(value, f"{prefix}{name}.") if isinstance(value, msgspec.Struct) else [prefix + name]
        return names

    assert [name for name in found if "[]." not in name] == leaves(Config())  # "[]." marks keys of a list's items
    assert [name for name, row in found.items() if not row["doc"]] == []
    assert found["learner.batch_size"] == {
        "name": "learner.batch_size",
        "type": "integer",
        "default": "256",
        "allowed": "from 1",
        "doc": "transitions in one update.",
    }
    assert found["learner.gradient_clip"]["type"] == "number or null"
    assert found["simulators"]["allowed"] == "from 1 to 64"
    assert found["timing"]["allowed"] == "free, lockstep"
    assert found["learner.algorithm"]["allowed"] == "td3, ddpg, a2c"
    assert found["safety.limits"]["type"] == "[number, number] or map of [number, number] or null"


def test_the_listed_default_of_each_key_is_the_default_of_the_schema() -> None:
    defaults = json.loads(msgspec.json.encode(Config()))
    for key in reference.all_keys():
        if "[]." in key.name:
            continue
        value = defaults
        for part in key.name.split("."):
            value = value[part]
        assert json.loads(key.default) == value


def test_an_unknown_list_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "robots"]) == 2
    assert "WHAT is 'robots'; allowed: configs, tasks" in capsys.readouterr().err
