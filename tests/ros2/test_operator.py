"""``td3-robot ros2 operator`` with real ROS 2 nodes in other processes, and a real policy server."""

from __future__ import annotations

import signal

import pytest

from tests.conftest import poll_until
from tests.ros2.conftest import HIP_SECTION, SAFETY, World, moves
from tests.ros2.test_driver import wait_for_safe


def test_an_operator_drives_a_robot_with_a_topic_and_with_a_joystick(hip: World) -> None:
    hip.configure(safety=SAFETY, ros2=HIP_SECTION, policy={"operator_deadline_ms": 2000})  # long, for a busy machine
    hip.robot()
    console = hip.console()
    hip.server()
    hip.driver()
    moves(console)
    operator = hip.ros_operator("--target", "robot", "--button", "1")
    wait_for_safe(console)  # no command of the operator has come yet

    def commanded(value: float) -> bool:
        newest = console.newest("/commands")
        return bool(newest == pytest.approx([value], abs=1e-6))

    def follows_topic() -> bool:
        console.publish("/td3_robot_operator/commands", [0.25])
        return commanded(0.25)

    def follows_joystick() -> bool:
        console.joy("/joy", [-0.5, 0.0], [0, 1])
        return commanded(-0.5)

    poll_until(follows_topic, lambda: f"the last command is {console.newest('/commands')}")
    state = "/td3_robot_driver/policy_state"
    poll_until(
        lambda: follows_topic() and console.newest(state)["message"] == "an operator moves the robot",
        lambda: str(console.newest(state)),
    )
    console.take("/commands")
    wait_for_safe(console)  # the test has stopped publishing on the topic
    poll_until(follows_joystick, lambda: f"the last command is {console.newest('/commands')}")
    console.publish("/td3_robot_operator/commands", [0.25, 0.5])
    operator.wait_for(r"commands: \[0.25, 0.5\] is not an action; allowed: 1 finite number\(s\)")
    operator.interrupt()
    assert operator.finish() == 128 + signal.SIGINT
    wait_for_safe(console)
    left = {"robot/0": "nobody: give it back, or take it over"}
    poll_until(lambda: hip.operator().state().detail["taken_over"] == left, operator.output)
