"""``td3-robot new``: a new driver and a new task pass the contract tests, and their own tests."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from td3_robot_sims import tasks

from td3_robot.cli.main import main
from td3_robot.config import loading
from td3_robot.driver.robot import Robot
from tests.contract.robot_driver import RobotContract
from tests.contract.simulator_backend import SimulatorBackendContract

NAMES = {"driver": "left_leg", "task": "reach_2"}
TASK = "gymnasium:reach_2_task:Reach2-v0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folders of a new driver and a new task. Their modules can be imported."""
    folders = {kind: tmp_path_factory.mktemp("new") / "own" for kind in NAMES}
    with pytest.MonkeyPatch.context() as patch:
        for kind, folder in folders.items():
            assert main(["new", kind, NAMES[kind], "--out", str(folder)]) == 0
            patch.syspath_prepend(folder)
        yield folders


@pytest.fixture
def robot(made: dict[str, Path]) -> Robot:
    del made
    driver: Robot = importlib.import_module("left_leg_driver").LeftLegDriver()
    return driver


def test_a_new_driver_cannot_have_the_name_of_the_policy_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "driver", "policy", "--out", str(tmp_path / "x")]) == 2
    assert "is 'policy', which is the name of the policy server; use another name" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


class TestNewDriver(RobotContract):
    @pytest.fixture
    def robot(self, robot: Robot) -> Robot:
        return robot


def test_the_commands_printed_for_a_new_driver_end_with_activate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "driver", "leg", "--out", str(tmp_path / "leg")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "  td3-robot node configure --config robot.yaml && td3-robot node activate --config robot.yaml"


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("task", [TASK])
class TestNewTask(SimulatorBackendContract): ...


@pytest.mark.parametrize("kind", NAMES)
def test_new_files_pass_their_own_tests(kind: str, made: dict[str, Path]) -> None:
    """The tests of the new files run real processes: the driver with the conformance kit, and a short training."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=made[kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_policy_of_the_new_task_fits_the_new_driver(robot: Robot) -> None:
    """Both templates describe the same robot. Only the robot's name differs here, because ``NAMES`` has two names."""
    task = tasks.spec(TASK)
    assert (robot.spec.name, task.name) == ("LeftLeg", "Reach2")
    assert robot.spec.describe() | {"name": ""} == task.describe() | {"name": ""}


def test_new_configurations_are_valid(made: dict[str, Path]) -> None:
    assert loading.load(made["task"] / "reach_2.yaml").task == TASK
    robot = loading.load(made["driver"] / "robot.yaml")
    assert (robot.safety.action_deadline_ms, robot.policy.autostart) == (200, False)


def test_an_existing_folder_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leg").mkdir()
    assert main(["new", "driver", "leg"]) == 2
    assert capsys.readouterr().err == "td3-robot new: 'leg' exists already; name another folder with --out\n"
    assert list(tmp_path.rglob("*")) == [tmp_path / "leg"]


@pytest.mark.parametrize("name", ["Leg", "left-leg", "2legs", "", "a/b", "x" * 32, "bein_ß"])
def test_a_malformed_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "task", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"td3-robot new: NAME is {name!r}; allowed: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "sensor", "leg"]) == 2
    assert "driver" in capsys.readouterr().err
