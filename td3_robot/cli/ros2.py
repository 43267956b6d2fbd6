"""``td3-robot ros2``: runs one of the ROS 2 nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from td3_robot.cli.verbs import Verb, find, listing
from td3_robot.errors import EXIT_GOOD, UsageError

NODES: dict[str, Verb] = {
    "driver": Verb("td3_robot.ros2.driver:main", "drive a robot that has a ROS 2 interface, as a lifecycle node"),
}
"""Node name to its row."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        raise UsageError(f"no node given; allowed: {', '.join(NODES)}")
    if words[0] in ("-h", "--help"):
        print(usage())
        return EXIT_GOOD
    return find(NODES, words[0], "node").run(words[1:])


def usage() -> str:
    """Return what ``td3-robot ros2 --help`` prints."""
    return (
        "usage: td3-robot ros2 NODE [ARGUMENTS] [--ros-args ROS_ARGUMENTS]\n\n"
        f"nodes:\n{listing(NODES)}\n\n"
        "examples:\n"
        "  td3-robot ros2 driver --config robot.yaml\n"
        "  td3-robot ros2 driver --config robot.yaml --ros-args -r __ns:=/left -p ros2.bundle:=policy.safetensors\n\n"
        "The nodes need rclpy from your ROS 2 installation. td3-robot ros2 NODE --help lists the arguments of a node."
    )
