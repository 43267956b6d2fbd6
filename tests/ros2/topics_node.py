"""A ROS 2 node that prints the messages of topics, or plays messages as ``ros2 bag play`` does.

    python topics_node.py listen TOPIC=TYPE …    prints a JSON list for each message: topic and fields
    python topics_node.py play FILE              publishes a message for each line of FILE. A line is a JSON list:
                                                 topic, type and bytes (hexadecimal)

If TOPIC ends with ``+``, the node also prints the newest message that was published before the node subscribed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile

EVERYTHING = QoSProfile(depth=0, history=HistoryPolicy.KEEP_ALL)
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def kind_of(name: str) -> Any:
    package, _, kind = name.split("/")
    return getattr(importlib.import_module(f"{package}.msg"), kind)


def plain(value: Any) -> Any:
    """Return a message as maps, lists, numbers and text."""
    if hasattr(value, "get_fields_and_field_types"):
        return {name: plain(getattr(value, name)) for name in value.get_fields_and_field_types()}
    if isinstance(value, bytes):
        return int.from_bytes(value, "little")
    if isinstance(value, str | int | float):
        return value
    return [plain(item) for item in value]


def listen(node: Any, places: list[str]) -> None:
    def subscribe(place: str, kind: str) -> None:
        topic = place.rstrip("+")

        def receive(message: Any) -> None:
            print(json.dumps([topic, plain(message)]), flush=True)

        node.create_subscription(kind_of(kind), topic, receive, EVERYTHING if topic == place else LATCHED)

    for place in places:
        subscribe(*place.split("="))
    print("ready", flush=True)
    rclpy.spin(node)


def play(node: Any, file: str) -> None:
    messages = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    kinds = {topic: kind for topic, kind, _ in messages}
    publishers = {topic: node.create_publisher(kind_of(kind), topic, EVERYTHING) for topic, kind in kinds.items()}
    while not all(publisher.get_subscription_count() for publisher in publishers.values()):
        rclpy.spin_once(node, timeout_sec=0.05)
    for topic, _, data in messages:
        publishers[topic].publish(bytes.fromhex(data))
    print("played", flush=True)
    rclpy.spin(node)  # do not exit yet, because a subscriber may ask for lost messages


if __name__ == "__main__":
    rclpy.init()
    verb, *words = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt, ExternalShutdownException):
        if verb == "listen":
            listen(rclpy.create_node(verb), words)
        else:
            play(rclpy.create_node(verb), words[0])
