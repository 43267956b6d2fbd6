"""A simulator backend with a mistake gives one line of error, and does not stop the tasks of other backends."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Backend, Environment

from td3_robot.cli.main import main
from td3_robot.config.randomization import RandomizationConfig
from td3_robot.errors import EXIT_USAGE, ConfigError
from td3_robot.specs import RobotSpec
from tests.contract.point_mass import SPEC, PointMass, PointMassBackend


class Abstract(Backend):
    """A backend without the methods that it must have."""


class FailingInit(PointMassBackend):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        raise RuntimeError("no\nlicence")


class FailingNames(PointMassBackend):
    def names(self) -> list[str]:
        raise OSError("no\nserver")


class WrongResults(Backend):
    """A backend whose methods return wrong values, except for the task ``Good``."""

    def names(self) -> list[str]:
        return ["NoSpec", "Good", "FailingSpec"]

    def spec(self, name: str) -> RobotSpec:
        if name == "FailingSpec":
            raise KeyError("no\nfile")
        return None if name == "NoSpec" else SPEC  # type: ignore[return-value] # the mistake to test

    def make(self, name: str, seed: int | None, randomization: RandomizationConfig | None) -> Environment:
        if name == "FailingMake":
            raise FileNotFoundError("no\nmodel")
        if name == "Leaving":
            sys.exit()
        made: Any = {"Good": PointMass(seed, randomization), "OtherRobot": OtherRobot(seed, randomization)}
        found: Environment = made.get(name)
        return found


class OtherRobot(PointMass):
    def __init__(self, seed: int | None, randomization: RandomizationConfig | None) -> None:
        super().__init__(seed, randomization)
        self.spec = RobotSpec("Mass", SPEC.observations, SPEC.actions, SPEC.control_period)


BROKEN = {
    "abstract": ("Abstract", "Abstract('abstract') raised TypeError: Can't instantiate abstract class Abstract"),
    "init": ("FailingInit", "FailingInit('init') raised RuntimeError: no licence"),
    "other": ("PointMass", "it must be a subclass of td3_robot_sims.backends.base.Backend"),
}
"""Maps the name of a backend that cannot be loaded to its class, and to words of the error."""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add broken backends to the table ``tasks.BACKENDS``, as installed packages do."""
    classes = {kind: name for kind, (name, _) in BROKEN.items()} | {"names": "FailingNames", "wrong": "WrongResults"}
    for kind, name in classes.items():
        monkeypatch.setitem(tasks.BACKENDS.rows, kind, f"{__name__}:{name}")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_backend_that_cannot_be_loaded_gives_one_line_of_error(kind: str) -> None:
    for call in (tasks.find, tasks.spec, tasks.make):
        with pytest.raises(ConfigError, match=re.escape(BROKEN[kind][1])) as refused:
            call(f"{kind}:Point")
        assert str(refused.value).startswith(f"simulator backend {kind!r}")
        assert "\n" not in str(refused.value)


def test_broken_backends_and_tasks_are_not_listed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["list", "tasks"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"Walker2D", "wrong:Good", "gymnasium:ID"} <= set(listed)
    assert not [name for name in listed if name.startswith((*BROKEN, "names", "wrong:NoSpec", "wrong:FailingSpec"))]
    warnings = [record.getMessage() for record in caplog.records]
    for kind, (_, words) in BROKEN.items():
        [line] = [line for line in warnings if line.startswith(f"simulator backend {kind!r}")]
        assert words in line
        assert line.endswith("; the tasks of this backend are not listed")
    assert (
        "simulator backend 'names': names() raised OSError: no server; the tasks of this backend are not listed"
        in warnings
    )
    assert (
        "task 'wrong:NoSpec': spec() of simulator backend 'wrong' returned None; it must return a RobotSpec; "
        "the task is not listed" in warnings
    )
    assert not [line for line in warnings if "\n" in line]


def test_a_broken_backend_does_not_stop_the_training_of_another_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The training of the task ``wrong:NoSpec`` fails at this task, so the command has passed the broken backends."""
    assert main(["train", "pendulum", "--out", str(tmp_path / "run"), "--set", "task=wrong:NoSpec"]) == EXIT_USAGE
    assert "td3-robot train: task 'wrong:NoSpec': spec() of simulator backend" in capsys.readouterr().err
    assert not caplog.records
    assert main(["train", "Walker2D"]) == EXIT_USAGE
    assert "CONFIG is 'Walker2D', which is a task" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "NoSpec",
            "task 'wrong:NoSpec': spec() of simulator backend 'wrong' returned None; it must return a RobotSpec",
        ),
        ("FailingSpec", "task 'wrong:FailingSpec': spec() of simulator backend 'wrong' raised KeyError: 'no\\nfile'"),
    ],
)
def test_the_error_says_what_is_wrong_with_a_specification(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        tasks.spec(f"wrong:{name}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Nothing", "make() of simulator backend 'wrong' returned None; it must return an Environment"),
        (
            "OtherRobot",
            "make() of simulator backend 'wrong' returned another robot than its spec(): "
            "robot is 'PointMass' here, 'Mass' there; both must agree",
        ),
    ],
)
def test_make_must_return_an_environment_of_the_specification(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^task 'wrong:{name}': {re.escape(text)}$"):
        tasks.make(f"wrong:{name}", 1)


@pytest.mark.parametrize(
    ("name", "problem"), [("FailingMake", "FileNotFoundError: no model"), ("Leaving", "SystemExit:")]
)
def test_the_error_names_the_exception_of_make(name: str, problem: str) -> None:
    text = f"task 'wrong:{name}': make() of simulator backend 'wrong' raised {problem}"
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        tasks.make(f"wrong:{name}", 1)
