"""``td3-robot ros2 monitor``: publishes the messages of a run or robot as ROS 2 topics."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from td3_robot.messages import Message
from td3_robot.monitor.core import Monitor
from td3_robot.monitor.node import ACCEPTS, watch, watcher_parser
from td3_robot.recording.entries import Entry
from td3_robot.recording.ros2_messages import Converter, Draft
from td3_robot.recording.values import Names
from td3_robot.ros2 import ros
from td3_robot.runtime.node import Node
from td3_robot.runtime.process import run_node
from td3_robot.topics import MONITOR
from td3_robot.util.output import say
from td3_robot.util.text import printable

_DEPTH = 10  # number of messages that wait for a slow subscriber
_REMARKS_PERIOD = 1.0  # seconds between two checks for new remarks of the converter
_EXAMPLES = """examples:
  td3-robot ros2 monitor --run runs/walker2d
  td3-robot ros2 monitor --config robot.yaml
  td3-robot ros2 monitor --run runs/walker2d --ros-args -r __ns:=/walker
  td3-robot ros2 monitor --config robot.yaml --ros-args -r leg/robot_0/joint_states:=joint_states     for RViz

"ros2 topic list", "ros2 bag record -a", rqt and PlotJuggler then see the topics. docs/how-to/view_recordings.md lists
the topics. No node waits for the monitor. The monitor ends with the run, or at Ctrl-C.
"""


def main(arguments: Sequence[str]) -> int:
    """Publish messages until the run ends or a signal arrives. Return the exit code of the process."""
    ours, ros_words = ros.split(arguments)
    description = "Publish the messages of nodes as ROS 2 topics. No node waits for the monitor."
    parser = watcher_parser("td3-robot ros2 monitor", description, _EXAMPLES)
    options = parser.parse_args(ours)
    with ros.running(ros_words):
        return run_node(MONITOR, options, _publish)


def _publish(node: Node) -> None:
    import rclpy

    ros_node = rclpy.create_node("td3_robot_monitor")
    publishers, converter = Publishers(ros_node), Converter()
    printed: set[str] = set()

    def receive(entry: Entry, message: Message, names: Names) -> None:
        del names
        for draft in converter.convert(entry, message):
            publishers.publish(draft)

    def show(monitor: Monitor) -> bool:
        del monitor
        new = [remark for remark in converter.remarks() if remark not in printed]
        printed.update(new)
        return all(say(printable(remark)) for remark in new)

    with ros.spinning(ros_node):  # the thread answers requests for the node's parameters
        node.listen(MONITOR, ACCEPTS)
        say(f"the ROS node {ros_node.get_fully_qualified_name()} publishes the messages")
        watch(node, receive, show, every=_REMARKS_PERIOD)


class Publishers:
    """The ROS publishers of a node. ``topics`` maps each topic to its publisher.

    :meth:`publish` creates the publisher of a topic when the first message of the topic comes.

    Topics are relative, so that they follow the namespace of the node. Only ``/diagnostics`` is global.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self.topics: dict[str, Any] = {}

    def publish(self, draft: Draft) -> None:
        """Publish a message. If the topic has no subscriber, publish the message only if it is latched.

        Later subscribers get the newest latched message.
        """
        publisher = self.topics.get(draft.topic)
        if publisher is None:
            publisher = self.topics[draft.topic] = self._create(draft)
        if draft.latched or publisher.get_subscription_count():
            publisher.publish(draft.data())

    def _create(self, draft: Draft) -> Any:
        from rclpy.qos import DurabilityPolicy, QoSProfile

        package, _, name = draft.type.split("/")
        kind = getattr(importlib.import_module(f"{package}.msg"), name)
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        topic = draft.topic if draft.topic == "/diagnostics" else draft.topic[1:]
        return self._node.create_publisher(kind, topic, latched if draft.latched else _DEPTH)
