"""``td3-robot ros2 operator``: a person drives a robot with a joystick or with commands on a ROS 2 topic."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from td3_robot.operators import Takeover, connect
from td3_robot.ros2 import ros
from td3_robot.runtime.arguments import Parser, add_index, integer, policy_servers
from td3_robot.util.output import say

log = logging.getLogger(__name__)

_COMPLAIN_EVERY = 5.0  # seconds between two warnings about wrong messages
_EPILOG = """examples:
  td3-robot ros2 operator --config robot.yaml --target leg
  td3-robot ros2 operator --config robot.yaml --target leg --ros-args -r joy:=/left/joy

topics:
  ~/commands (std_msgs/Float64MultiArray): one number for each action channel, in the unit of the channel
  joy (sensor_msgs/Joy): while the button is pressed, axis 0 sets channel 0 (-1: its lower limit, 1: its upper limit),
  axis 1 sets channel 1, and so on

The robot gets the safe action while no message comes. After Ctrl-C the robot keeps the safe action: give the robot
back with td3-robot node give_back. docs/how-to/take_over.md explains takeovers."""


def main(arguments: Sequence[str]) -> int:
    """Take over a robot, and send actions until a signal or an error."""
    ours, ros_words = ros.split(arguments)
    parser = Parser(
        prog="td3-robot ros2 operator", description="Take over a robot, and drive it by ROS 2 topics.", epilog=_EPILOG
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="configuration of the policy server")
    parser.add_argument("--target", required=True, metavar="NAME", help="name of the robot")
    add_index(parser)
    parser.add_argument(
        "--button",
        type=integer(0, 1000),
        default=0,
        metavar="N",
        help="the joystick has an effect only while its button with this index is pressed (default: %(default)s)",
    )
    options = parser.parse_args(ours)
    [endpoint], keys = policy_servers(options)
    operator = connect(endpoint, keys)
    with ros.running(ros_words):
        import rclpy

        node = rclpy.create_node("td3_robot_operator")
        with operator.takeover(options.target, options.index, "ros2 operator") as robot:
            inbox = Inbox(node, robot, options.button)
            with ros.spinning(node):
                say(f"the ROS node {node.get_fully_qualified_name()} drives {options.target}")
                while True:
                    if inbox.newest:
                        robot.command(inbox.newest.pop())
                    robot.wait()


class Inbox:
    """Converts the messages of both topics to actions. ``newest`` holds the newest action, until ``main`` takes it.

    The joystick has an effect only while its button with the index ``button`` is pressed.
    """

    def __init__(self, node: Any, robot: Takeover, button: int) -> None:
        from sensor_msgs.msg import Joy
        from std_msgs.msg import Float64MultiArray

        self.newest: deque[list[float]] = deque(maxlen=1)
        self._robot = robot
        self._button = button
        self._complained = float("-inf")
        node.create_subscription(Float64MultiArray, "~/commands", lambda it: self._take("commands", it.data), 1)
        node.create_subscription(Joy, "joy", self._joy, 1)

    def _joy(self, message: Any) -> None:
        if self._button < len(message.buttons) and message.buttons[self._button]:
            ranges = [(channel["low"], channel["high"]) for channel in self._robot.actions]
            axes = message.axes[: len(ranges)]
            moved = [low + (axis + 1) / 2 * (high - low) for axis, (low, high) in zip(axes, ranges, strict=False)]
            self._take("joy", moved)

    def _take(self, topic: str, values: Sequence[float]) -> None:
        try:
            self.newest.append(self._robot.check(values))
        except ValueError as error:
            if time.monotonic() - self._complained > _COMPLAIN_EVERY:
                self._complained = time.monotonic()
                log.warning("%s: %s", topic, error)
