"""ROS messages become observations, and actions become values of commands. Plain objects replace ROS messages here."""

from __future__ import annotations

from types import SimpleNamespace as Message
from typing import Any

import numpy as np
import pytest

from td3_robot.config import loading as configuration
from td3_robot.config.ros2 import Ros2Config
from td3_robot.driver.robot import Robot
from td3_robot.errors import ConfigError
from td3_robot.ros2.robot import Inputs, Outputs, Ros2Robot, StaleError, StoppedError
from td3_robot.ros2.ros import split
from td3_robot.specs import Channel, RobotSpec
from tests.contract.robot_driver import RobotContract

SPEC = RobotSpec(
    "Leg",
    tuple(Channel(name, "1", -100.0, 100.0) for name in ("hip", "hip.velocity", "roll_rate", "foot")),
    (Channel("left", "N·m", -1.0, 1.0), Channel("right", "N·m", -1.0, 1.0)),
    0.01,
)
SOURCES: list[dict[str, Any]] = [
    {"channel": "foot", "topic": "feet", "index": 1, "offset": 5.0},
    {"channel": "hip", "joint": "hip_joint", "sign": -1, "scale": 2.0, "offset": 0.5},
    {"channel": "hip.velocity", "joint": "hip_joint", "field": "velocity"},
    {"channel": "roll_rate", "imu": "angular_velocity.x"},
]


def section(**keys: Any) -> Ros2Config:
    """Return a section ``ros2``. By default, no value becomes stale within a test."""
    return configuration.parse({"ros2": {"observations": SOURCES, "stale_ms": 1e6, **keys}}).ros2


def joints(names: list[str], **fields: list[float]) -> Message:
    return Message(name=names, **{"position": [], "velocity": [], "effort": [], **fields})


IMU = Message(angular_velocity=Message(x=0.25, y=9.0, z=9.0))
FEET = Message(data=[9.0, 3.0])


class TestRos2Robot(RobotContract):
    @pytest.fixture
    def robot(self) -> Robot:
        inputs = Inputs(SPEC, section())
        store_all(inputs)
        return Ros2Robot(SPEC, inputs, Outputs(SPEC, section()), [].append)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def store_all(inputs: Inputs) -> None:
    inputs.store("joint_states", joints(["knee", "hip_joint"], position=[9.0, 3.0], velocity=[9.0, -4.0]))
    inputs.store("imu", IMU)
    inputs.store("feet", FEET)


def test_each_channel_gets_its_scaled_value() -> None:
    inputs = Inputs(SPEC, section())
    assert inputs.topics == {"joint_states": "joint", "imu": "imu", "feet": "array"}
    store_all(inputs)
    # hip: -1 · 2 · 3 + 0.5; foot: 3 + 5
    assert inputs.read().tolist() == [-5.5, -4.0, 0.25, 8.0]
    assert inputs.read().dtype == np.float32


def test_joints_are_found_by_name_in_any_order() -> None:
    inputs = Inputs(SPEC, section())
    store_all(inputs)
    for names in (["hip_joint", "knee"], ["a", "knee", "hip_joint"]):
        place = names.index("hip_joint")
        position = [1.0 if index == place else 9.0 for index in range(len(names))]
        inputs.store("joint_states", joints(names, position=position, velocity=position))
        assert inputs.read()[:2].tolist() == [-1.5, 1.0]


def test_the_age_of_a_value_is_measured_from_the_time_when_it_arrived() -> None:
    clock = Clock()
    inputs = Inputs(SPEC, section(stale_ms=50), clock)
    store_all(inputs)
    clock.now += 0.049
    assert inputs.read().shape == (4,)
    clock.now += 0.002
    inputs.store("imu", IMU)
    inputs.store("feet", FEET)
    with pytest.raises(
        StaleError, match=r"^'hip': no position of joint 'hip_joint' has come on 'joint_states' for 50 ms$"
    ):
        inputs.read()
    assert inputs.ages() == pytest.approx({"joint_states": 0.051, "imu": 0.0, "feet": 0.0}, abs=1e-6)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (joints(["knee"], position=[1.0], velocity=[1.0]), "no position of joint 'hip_joint'"),
        (joints(["hip_joint"], position=[1.0]), "no velocity of joint 'hip_joint'"),
        (joints(["hip_joint"], velocity=[1.0]), "no position of joint 'hip_joint'"),
    ],
)
def test_a_channel_stays_empty_if_the_message_has_no_value_for_the_channel(message: Message, text: str) -> None:
    inputs = Inputs(SPEC, section())
    inputs.store("imu", IMU)
    inputs.store("feet", FEET)
    inputs.store("joint_states", message)
    with pytest.raises(StaleError, match=f"{text} has come on 'joint_states' yet"):
        inputs.read()


def test_a_short_array_changes_no_value() -> None:
    inputs = Inputs(SPEC, section())
    store_all(inputs)
    before = inputs.read().tolist()
    inputs.store("feet", Message(data=[9.0]))
    assert inputs.read().tolist() == before


def test_the_wait_ends_at_a_stop_or_when_every_channel_has_a_value() -> None:
    inputs = Inputs(SPEC, section())
    assert not inputs.wait(10.0, lambda: True)
    store_all(inputs)
    assert inputs.wait(10.0, lambda: False)


def test_actions_have_the_order_and_the_scale_of_the_configuration() -> None:
    actions = [
        {"channel": "right", "joint": "r"},
        {"channel": "left", "joint": "l", "sign": -1, "scale": 10, "offset": 1},
    ]
    outputs = Outputs(SPEC, section(actions=actions))
    assert outputs.joints == ["r", "l"]
    assert outputs.values(np.array([0.5, -0.25], np.float32)) == [-0.25, -4.0]
    assert Outputs(SPEC, section()).values(np.array([0.5, -0.25], np.float32)) == [0.5, -0.25]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"observations": SOURCES[1:]}, "ros2.observations has no source for the observation 'foot' of 'Leg'"),
        (
            {"observations": [*SOURCES, {"channel": "hipp", "joint": "x"}]},
            "ros2.observations: robot 'Leg' has no observation 'hipp'; did you mean 'hip'?",
        ),
        (
            {"observations": [*SOURCES[1:], {"channel": "foot", "topic": "imu", "index": 0}]},
            "ros2.observations of 'foot': the topic 'imu' has messages of two types; allowed: one type",
        ),
    ],
)
def test_sources_that_do_not_fit_the_robot_are_refused(keys: dict[str, Any], text: str) -> None:
    config = section(**keys)
    with pytest.raises(ConfigError) as caught:
        Inputs(SPEC, config)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("channel", "text"),
    [
        ("left", "ros2.actions lacks the action 'right' of 'Leg'; name every action, or no action"),
        ("up", "ros2.actions: robot 'Leg' has no action 'up'; it has"),
    ],
)
def test_actions_that_do_not_fit_the_robot_are_refused(channel: str, text: str) -> None:
    config = section(actions=[{"channel": channel}])
    with pytest.raises(ConfigError) as caught:
        Outputs(SPEC, config)
    assert text in str(caught.value)


def test_after_an_emergency_stop_observe_fails_but_apply_still_sends_actions() -> None:
    inputs, sent = Inputs(SPEC, section()), []
    store_all(inputs)
    robot = Ros2Robot(SPEC, inputs, Outputs(SPEC, section()), sent.append)
    assert robot.observe().shape == (4,)
    robot.stopped_by = "a person"
    with pytest.raises(StoppedError, match="a person"):
        robot.observe()
    robot.apply(np.array([0.0, 1.0], np.float32))
    assert sent == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("line", "ours", "ros"),
    [
        ("--config a", "--config a", ""),
        ("--config a --ros-args -r a:=b", "--config a", "--ros-args -r a:=b"),
        ("--ros-args -r a:=b -- --name leg", "--name leg", "--ros-args -r a:=b --"),
        (
            "--ros-args -p a:=1 -- --name leg --ros-args -r __ns:=/x",
            "--name leg",
            "--ros-args -p a:=1 -- --ros-args -r __ns:=/x",
        ),
    ],
)
def test_the_arguments_of_ros_are_split_off(line: str, ours: str, ros: str) -> None:
    assert split(line.split()) == (ours.split(), ros.split())
