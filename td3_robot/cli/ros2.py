"""``td3-robot ros2``: runs one of the ROS 2 nodes."""

from __future__ import annotations

from collections.abc import Sequence

from td3_robot.cli.verbs import Verb, listing, run_row

NODES: dict[str, Verb] = {
    "driver": Verb("td3_robot.ros2.driver:main", "run a lifecycle node that drives a robot with a ROS 2 interface"),
    "operator": Verb("td3_robot.ros2.operator:main", "take over a robot, and drive it by a joystick or a topic"),
    "monitor": Verb("td3_robot.ros2.monitor:main", "publish the messages of a run or a robot as ROS 2 topics"),
}
"""For each ROS 2 node: its name, the function that runs it, and its purpose."""


def main(arguments: Sequence[str]) -> int:
    usage = (
        "usage: td3-robot ros2 NODE [ARGUMENTS] [--ros-args ROS_ARGUMENTS]\n\n"
        f"nodes:\n{listing(NODES)}\n\n"
        "examples:\n"
        "  td3-robot ros2 driver --config robot.yaml\n"
        "  td3-robot ros2 driver --config robot.yaml --ros-args -r __ns:=/left -p ros2.bundle:=policy.safetensors\n"
        "  td3-robot ros2 operator --config robot.yaml --target leg\n"
        "  td3-robot ros2 monitor --run runs/walker2d\n\n"
        "The nodes need rclpy from your ROS 2 installation. td3-robot ros2 NODE --help lists the arguments of a node."
    )
    return run_row(NODES, "node", usage, arguments)
