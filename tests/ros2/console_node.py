"""A ROS 2 node that a test controls with lines of JSON. The node calls services, and publishes and reads messages.

    python console_node.py NAMESPACE …

The node first prints "ready". Each line of standard input is a list: an operation and its arguments. The node answers
each line with a map. The map has the key ``result``, or, after a timeout, the key ``error``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import JointState, Joy
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

PATIENCE = 60.0  # seconds
CALLS = 3  # times to ask for a state


class Console:
    def __init__(self, namespaces: list[str]) -> None:
        self.node = rclpy.create_node("console")
        self._newest: dict[str, Any] = {}
        self._all: dict[str, list[Any]] = {}
        self._publishers: dict[str, Any] = {}
        self._clients: dict[str, Any] = {}
        best_effort = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        for place in namespaces:
            driver = f"{place}/td3_robot_driver"
            self._watch(JointState, f"{place}/joint_states", best_effort, lambda it: list(it.name))
            self._watch(Float64MultiArray, f"{place}/commands", 100, lambda it: list(it.data))
            self._watch(JointTrajectory, f"{place}/joint_trajectory", 100, trajectory)
            self._watch(DiagnosticStatus, f"{driver}/policy_state", latched, status)
        self._watch(DiagnosticArray, "/diagnostics", 10, lambda it: [status(one) for one in it.status])

    def _watch(self, kind: Any, topic: str, qos: Any, read: Callable[[Any], Any]) -> None:
        def receive(message: Any) -> None:
            value = self._newest[topic] = read(message)
            self._all.setdefault(topic, []).append(value)

        self.node.create_subscription(kind, topic, receive, qos)

    # -- operations ----------------------------------------------------------------------------------------------

    def newest(self, topic: str) -> Any:
        """Return the newest value that has come on a topic; None before the first value."""
        return self._newest.get(topic)

    def take(self, topic: str) -> list[Any]:
        """Return the values that have come on a topic since the previous call."""
        return self._all.pop(topic, [])

    def trigger(self, service: str) -> dict[str, Any]:
        """Call a service of the type std_srvs/Trigger."""
        answer = self._call(Trigger, service, Trigger.Request())
        return {"success": answer.success, "message": answer.message}

    def change(self, node: str, transition: str) -> bool:
        """Request a lifecycle transition of a node, and return whether the transition succeeded."""
        request = ChangeState.Request()
        request.transition.label = transition
        return bool(self._call(ChangeState, f"{node}/change_state", request).success)

    def state(self, node: str) -> str:
        """Return the lifecycle state of a node."""
        return str(self._call(GetState, f"{node}/get_state", GetState.Request()).current_state.label)

    def nodes(self) -> list[str]:
        return sorted(f"{place.rstrip('/')}/{name}" for name, place in self.node.get_node_names_and_namespaces())

    def reliability(self, topic: str, node: str) -> list[str]:
        """For one topic and one node: return the reliability of each publisher and subscription."""
        ends = [*self.node.get_publishers_info_by_topic(topic), *self.node.get_subscriptions_info_by_topic(topic)]
        return [end.qos_profile.reliability.name.lower() for end in ends if end.node_name == node]

    def publish(self, topic: str, values: list[float]) -> None:
        """Publish a std_msgs/Float64MultiArray."""
        self._publisher(Float64MultiArray, topic).publish(Float64MultiArray(data=values))

    def joy(self, topic: str, axes: list[float], buttons: list[int]) -> None:
        """Publish a sensor_msgs/Joy."""
        self._publisher(Joy, topic).publish(Joy(axes=axes, buttons=buttons))

    def _publisher(self, kind: Any, topic: str) -> Any:
        if topic not in self._publishers:
            self._publishers[topic] = self.node.create_publisher(kind, topic, 1)
        return self._publishers[topic]

    def _call(self, kind: Any, service: str, request: Any) -> Any:
        """Call a service. Keep its client: on a busy machine, ROS can lose the answer to a new client.

        For the same reason, ask for a state again if there is no answer. Send each request for an action only once,
        because a node must not ignore it.
        """
        if service not in self._clients:
            self._clients[service] = self.node.create_client(kind, service)
        client = self._clients[service]
        if not client.wait_for_service(PATIENCE):
            raise TimeoutError(f"no service {service}")
        calls = CALLS if kind is GetState else 1
        for _ in range(calls):
            done = threading.Event()
            future = client.call_async(request)
            future.add_done_callback(lambda _, done=done: done.set())
            if done.wait(PATIENCE / calls):
                return future.result()
        raise TimeoutError(f"no answer of {service}")


def status(message: DiagnosticStatus) -> dict[str, Any]:
    values = {pair.key: pair.value for pair in message.values}
    return {"level": message.level[0], "name": message.name, "message": message.message, "values": values}


def trajectory(message: JointTrajectory) -> dict[str, Any]:
    [point] = message.points
    reach = point.time_from_start
    return {
        "joints": list(message.joint_names),
        "positions": list(point.positions),
        "velocities": list(point.velocities),
        "effort": list(point.effort),
        "reach": reach.sec + reach.nanosec / 1e9,
    }


if __name__ == "__main__":
    rclpy.init()
    console = Console([place.rstrip("/") for place in sys.argv[1:]])
    executor = SingleThreadedExecutor()
    executor.add_node(console.node)
    threading.Thread(target=executor.spin, daemon=True).start()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(console, operation)(*arguments)}
        except TimeoutError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)
