"""A robot model that does not fit its file is an error of one line, which names the robot and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from td3_robot_sims.backends.bullet.robots import RobotModel, specification
from td3_robot_sims.backends.bullet.world import World

from td3_robot.errors import ConfigError
from tests.contract.test_simulator_backends import TWO_LEGS

MJCF = """<mujoco>
<worldbody><body name="torso" pos="0 0 0.5"><geom type="sphere" size="0.1"/>
<body name="left_leg"><joint name="left_hip" type="hinge" axis="0 1 0" limited="true" range="-30 30"/>
<geom type="capsule" fromto="0 0 0 0 0 -0.3" size="0.03"/></body></body></worldbody></mujoco>"""
JOINTS = "its RobotModel has the joints {}; {{file}} has {{joints}}; both lists must be equal"
LEFT, RIGHT = ("left_hip", 50.0), ("right_hip", 50.0)


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def limits(text: str, new: str) -> str:
    return changed(text, '<limit lower="-1" upper="1" effort="50" velocity="10"/>', new)


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
    ("change", "text"),
    [
        ({"joints": ("left_hip",)}, "an item of joints is 'left_hip'; allowed: pairs (name, finite torque gain)"),
        (
            {"joints": (LEFT, ("right_hip", math.nan))},
            "an item of joints is ('right_hip', nan); allowed: pairs (name, finite torque gain)",
        ),
        ({"joints": {"left_hip": 50.0}}, "joints is {'left_hip': 50.0}; allowed: pairs (name, finite torque gain)"),
        ({"joints": None}, "joints is None; allowed: pairs (name, finite torque gain)"),
        ({"power": None}, "power is None; allowed: finite numbers"),
        ({"feet": "left_leg"}, "feet is 'left_leg'; allowed: names of links, such as ('foot',)"),
        ({"power": "1"}, "power is '1'; allowed: finite numbers"),
        ({"base_height": math.inf}, "base_height is inf; allowed: finite numbers"),
    ],
)
def test_a_model_with_wrong_values_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        replace(TWO_LEGS, **change)
    assert str(error.value) == f"robot 'TwoLegs': {text}"


def test_lists_of_a_model_become_tuples() -> None:
    lists: dict[str, object] = {"joints": [list(LEFT), list(RIGHT)], "feet": list(TWO_LEGS.feet)}
    assert specification(replace(TWO_LEGS, **lists)) == specification(TWO_LEGS)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda text: text[:600],
            "PyBullet cannot load {file} (Error=XML_ERROR_PARSING_ATTRIBUTE ErrorID=8 (0x8) Line number=12: "
            "XMLElement name=inertia); allowed: a file .urdf or .xml (MJCF) with one robot",
        ),
        (
            lambda text: changed(text, '<box size="0.4 0.3 0.1"/>', '<mesh filename="body.stl"/>'),
            "PyBullet cannot load {file} ({path}:5: cannot find 'body.stl' in any directory in urdf path "
            "Could not parse collision element for Link: body failed to parse link); "
            "allowed: a file .urdf or .xml (MJCF) with one robot",
        ),
        (
            lambda text: limits(text, '<limit effort="50" velocity="10"/>'),
            "joint 'left_hip' has the limits 0 and -1 in {file}; "
            "each joint needs a lower limit below its upper limit, both finite",
        ),
        (
            lambda text: limits(text, '<limit lower="0.5" upper="0.5" effort="50" velocity="10"/>'),
            "joint 'left_hip' has the limits 0.5 and 0.5 in {file}; "
            "each joint needs a lower limit below its upper limit, both finite",
        ),
        (
            lambda text: limits(text, '<limit lower="-inf" upper="inf" effort="50" velocity="10"/>'),
            "joint 'left_hip' has the limits -inf and inf in {file}; "
            "each joint needs a lower limit below its upper limit, both finite",
        ),
        (
            lambda text: changed(text, '<mass value="5"/>', '<mass value="0"/>'),
            "the root link of {file} has no mass, so the robot hangs in the air; "
            "allowed: a root link with a mass above 0",
        ),
        (
            # PyBullet returns the bytes of a name unchanged. These bytes are not UTF-8.
            lambda text: changed(text, '"left_hip"', '"left_h\udcfcft"'),
            "its RobotModel has the joints ['left_hip', 'right_hip']; {file} has ['left_h\ufffdft', 'right_hip']; "
            "both lists must be equal",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(damage: Callable[[str], str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "ein Hünd.urdf"
    damaged = damage(Path(TWO_LEGS.file).read_text(encoding="utf-8"))
    file.write_text(damaged, encoding="utf-8", errors="surrogateescape")
    assert refused(replace(TWO_LEGS, file=str(file))) == text.format(file=repr(str(file)), path=file)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            ' limited="true" range="-30 30"',
            ' range="-30 30"',
            "joint 'left_hip' has the limits 1 and 0 in {file}; each joint needs a lower limit below its upper limit, "
            'both finite (attribute range, with limited="true")',
        ),
        (
            '<worldbody><body name="torso" pos="0 0 0.5"><geom type="sphere" size="0.1"/>',
            '<asset><mesh name="ball" file="ball.stl"/></asset><worldbody><body name="torso" pos="0 0 0.5">'
            '<geom type="mesh" mesh="ball"/>',
            "PyBullet cannot read a mesh of {file} ({path}:2: cannot find 'ball.stl' in any directory in urdf path)",
        ),
    ],
)
def test_an_mjcf_file_that_pybullet_reads_only_in_part_is_refused(
    old: str, new: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "dog.xml"
    model = replace(TWO_LEGS, file=str(file), joints=(LEFT,), feet=("left_leg",), base_height=None)
    file.write_text(MJCF, encoding="utf-8")
    World(model).close()
    file.write_text(changed(MJCF, old, new), encoding="utf-8")
    assert refused(model) == text.format(file=repr(str(file)), path=file)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("body.obj", "issue extracting mesh from COLLADA/STL file {mesh}"),
        ("body.stl", "{folder}/: cannot extract mesh from '{mesh}'"),
    ],
)
def test_a_mesh_file_without_a_mesh_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    file, mesh = tmp_path / "dog.urdf", tmp_path / name
    mesh.write_text("junk" * 30, encoding="utf-8")
    text = Path(TWO_LEGS.file).read_text(encoding="utf-8")
    file.write_text(changed(text, '<box size="0.4 0.3 0.1"/>', f'<mesh filename="{name}"/>'), encoding="utf-8")
    why = reason.format(folder=tmp_path, mesh=mesh)
    assert refused(replace(TWO_LEGS, file=str(file))) == f"PyBullet cannot read a mesh of {str(file)!r} ({why})"


def refused(model: RobotModel) -> str:
    with pytest.raises(ConfigError) as error:
        World(model)
    return str(error.value).removeprefix("robot 'TwoLegs': ")
