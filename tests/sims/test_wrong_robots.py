"""A robot model that does not fit its file is an error of one line, which names the robot and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from td3_robot_sims.backends.bullet.robots import RobotModel
from td3_robot_sims.backends.bullet.world import World

from td3_robot.errors import ConfigError
from tests.contract.test_simulator_backends import TWO_LEGS

JOINTS = "its RobotModel has the joints {}; {{file}} has {{joints}}; both lists must be equal"
LEFT, RIGHT = ("left_hip", 50.0), ("right_hip", 50.0)


def limits(text: str, new: str) -> str:
    old = '<limit lower="-1" upper="1" effort="50" velocity="10"/>'
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"file": "/nowhere/dog.urdf"}, "there is no file '/nowhere/dog.urdf'; allowed: a file .urdf or .xml"),
        ({"joints": (LEFT, ("knee", 1.0))}, JOINTS.format("['left_hip', 'knee']")),
        ({"joints": (RIGHT, LEFT)}, JOINTS.format("['right_hip', 'left_hip']")),
        ({"feet": ("left_leg", "rihgt_leg")}, "{file} has no link 'rihgt_leg'; did you mean 'right_leg'?"),
    ],
)
def test_a_model_that_does_not_fit_its_file_is_refused(change: dict[str, object], text: str) -> None:
    assert refused(replace(TWO_LEGS, **change)) == text.format(
        file=repr(TWO_LEGS.file), joints=["left_hip", "right_hip"]
    )


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda text: text[:600], "PyBullet cannot load {file}; allowed: a file .urdf or .xml (MJCF) with one robot"),
        (
            lambda text: limits(text, '<limit effort="50" velocity="10"/>'),
            "joint 'left_hip' has the limits 0 and -1 in {file}; each joint needs a lower limit below its upper limit",
        ),
        (
            lambda text: limits(text, '<limit lower="0.5" upper="0.5" effort="50" velocity="10"/>'),
            "joint 'left_hip' has the limits 0.5 and 0.5 in {file}; "
            "each joint needs a lower limit below its upper limit",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(damage: Callable[[str], str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "ein Hünd.urdf"
    file.write_text(damage(Path(TWO_LEGS.file).read_text(encoding="utf-8")), encoding="utf-8")
    assert refused(replace(TWO_LEGS, file=str(file))) == text.format(file=repr(str(file)))


def refused(model: RobotModel) -> str:
    with pytest.raises(ConfigError) as error:
        World(model)
    return str(error.value).removeprefix("robot 'TwoLegs': ")
