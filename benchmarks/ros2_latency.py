"""Measure the time from a JointState to the command that answers it, for the driver and for a plain rclpy echo node.

Both nodes are separate processes and get the same messages. The driver reads the newest message once in each control
period (10 ms). So the driver's time includes the time that a message waits for the next period. At 100 messages per
second, this wait is 5 ms on average. At 500 messages per second it is 1 ms, because the newest message is at most 2 ms
old. Run the script with a Python that has rclpy:

    .venv/ros2/bin/python benchmarks/ros2_latency.py
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.bench import harness
from td3_robot.bundle import Bundle, Exploration, layer_shapes
from td3_robot.errors import NodeError
from td3_robot.ros2 import ros
from td3_robot.specs import Channel, RobotSpec

SPEC = RobotSpec("Echo", (Channel("joint", "1", -1.0, 1.0),), (Channel("action", "1", -1.0, 1.0),), 0.01)
_JOINTS = 12
_CYCLE = 1000  # positions are 1/1000 to 999/1000; a position shows which message a command answers
_START = 60.0  # seconds for all processes to start
_STOP = 20.0  # seconds for a process to end
_DOMAIN = "101"
_TOPICS = {"echo": "echo", "driver": "commands"}  # the topic of each node's answers
_CLI = (sys.executable, "-m", "td3_robot.cli.main")


def main() -> int:
    parser = harness.Options("python benchmarks/ros2_latency.py", "Measure the time from a JointState to its command.")
    parser.number("--rates", [100, 500], "HZ", "JointStates per second")
    parser.number("--seconds", 10.0, "S", "time for each rate", low=0.1)
    options = parser.parse_args()
    os.environ.setdefault("ROS_DOMAIN_ID", _DOMAIN)
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    report: harness.Report = {"machine": harness.describe("td3-robot", "numpy"), "rates": {}}
    with ros.running([]), tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder, peers(Path(folder)):
        probe = Probe()
        with ros.spinning(probe.node):
            probe.run(1 / options.rates[0], _START, until_answered=True)
            for rate in options.rates:
                report["rates"][str(rate)] = probe.run(1 / rate, options.seconds)
    return harness.show(report, options.json, _lines)


@contextlib.contextmanager
def peers(folder: Path) -> Iterator[None]:
    """Run a policy server, the driver and the echo node. The action is tanh(position of the joint)."""
    hidden = (2,)
    tensors = {name: np.zeros(shape, "f4") for name, shape in layer_shapes(SPEC, hidden).items()}
    tensors["actor.0.weight"][:] = [[1], [-1]]
    tensors["actor.1.weight"][:] = [[1, -1]]
    Bundle(SPEC, hidden, tensors, Exploration("none", 0.0), {"version": 1}).save(folder / "policy.safetensors")
    config = {
        "endpoints": {"policy": f"ipc://{folder / 'policy'}"},
        "safety": {"safe_action": "zero", "action_deadline_ms": 2000, "recovery": "automatic", "recovery_ms": 10},
        "ros2": {
            "bundle": str(folder / "policy.safetensors"),
            "stale_ms": 1000,
            "observations": [{"channel": "joint", "joint": f"joint{_JOINTS - 1}"}],
        },
    }
    (folder / "robot.yaml").write_text(json.dumps(config))
    commands = (
        [*_CLI, "policy", "--bundle", "policy.safetensors", "--config", "robot.yaml", "--frozen"],
        [*_CLI, "ros2", "driver", "--config", "robot.yaml"],
        [sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['echo']()"],
    )
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        started = [subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) for command in commands]
        try:
            yield
        finally:
            for process in started:
                process.terminate()
            for process in started:
                try:
                    process.wait(_STOP)
                except subprocess.TimeoutExpired:  # a node that hangs while it shuts down
                    process.kill()
                    process.wait()


def echo() -> None:
    """Run a node that answers each JointState with the position of its last joint."""
    import rclpy
    from sensor_msgs.msg import JointState
    from std_msgs.msg import Float64MultiArray

    rclpy.init()
    node = rclpy.create_node("echo")
    publisher = node.create_publisher(Float64MultiArray, "echo", 1)
    node.create_subscription(
        JointState,
        "joint_states",
        lambda message: publisher.publish(Float64MultiArray(data=[message.position[-1]])),
        _sensor_qos(),
    )
    with contextlib.suppress(KeyboardInterrupt, rclpy.executors.ExternalShutdownException):
        rclpy.spin(node)


def _sensor_qos() -> Any:
    from rclpy.qos import QoSProfile, ReliabilityPolicy

    return QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)


class Probe:
    """Publishes JointStates, and measures when their answers come."""

    def __init__(self) -> None:
        import rclpy
        from sensor_msgs.msg import JointState
        from std_msgs.msg import Float64MultiArray

        self.node = rclpy.create_node("probe")
        self._message = JointState
        self._publisher = self.node.create_publisher(JointState, "joint_states", _sensor_qos())
        self._sent = [0] * _CYCLE  # ns
        self._taken: dict[str, dict[int, int]] = {}
        self._answered = threading.Event()
        for topic, decode in (("echo", float), ("commands", math.atanh)):
            self.node.create_subscription(Float64MultiArray, topic, self._receiver(topic, decode), 1)

    def _receiver(self, topic: str, decode: Any) -> Any:
        def receive(message: Any) -> None:
            now = time.perf_counter_ns()
            number = round(decode(message.data[0]) * _CYCLE)
            if 0 < number < _CYCLE and self._sent[number]:
                # The driver may answer a message twice. Measure only the first answer.
                self._taken.setdefault(topic, {}).setdefault(self._sent[number], now - self._sent[number])
            if len(self._taken) == 2:
                self._answered.set()

        return receive

    def run(self, period: float, seconds: float, *, until_answered: bool = False) -> dict[str, Any]:
        """Publish for some seconds. For each node, return percentiles of its answer times.

        With ``until_answered``, the call ends as soon as both nodes have answered.

        Raises:
            NodeError: a node has not answered.
        """
        self._taken = {}
        self._answered.clear()
        names = [f"joint{index}" for index in range(_JOINTS)]
        begin = time.perf_counter()
        number = 0
        while (now := time.perf_counter()) < begin + seconds and not (until_answered and self._answered.is_set()):
            due = begin + number * period
            if now < due:
                time.sleep(due - now)
            place = 1 + number % (_CYCLE - 1)
            message = self._message(name=names, position=[0.0] * (_JOINTS - 1) + [place / _CYCLE])
            self._sent[place] = time.perf_counter_ns()
            self._publisher.publish(message)
            number += 1
        if not self._answered.is_set():
            silent = [node for node, topic in _TOPICS.items() if topic not in self._taken]
            raise NodeError(f"no answer from {' and '.join(silent)} within {seconds:g} s")
        times = {topic: list(taken.values()) for topic, taken in self._taken.items()}
        rows = {node: times[topic] for node, topic in _TOPICS.items()}
        return {node: harness.percentiles(taken) | {"answers": len(taken)} for node, taken in rows.items()}


def _lines(report: harness.Report) -> Iterator[str]:
    yield harness.PERCENTILES
    for rate, rows in report["rates"].items():
        for kind, row in rows.items():
            yield harness.percentile_row(f"{rate:>4} Hz, {kind}", row) + f"   {row['answers']} answers"


if __name__ == "__main__":
    harness.run_script(main)
