"""Exports a recording as a second MCAP file with ROS 2 messages.

The types are those of ROS 2 Humble. Each robot of a Step becomes a sensor_msgs/JointState. Each Status becomes a
diagnostic_msgs/DiagnosticArray. Positions and velocities come from observation channels, efforts from action channels.
They keep the units of the channels; normalised values stay normalised.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mcap.writer import Writer
from rosbags.typesys import Stores, get_typestore

from td3_robot.messages import Status, Step
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session

_JOINT_STATE, _DIAGNOSTICS = "sensor_msgs/msg/JointState", "diagnostic_msgs/msg/DiagnosticArray"
_OK, _ERROR = 0, 2
_EFFORTS = ("torque", "effort", "force")
_STORE = get_typestore(Stores.ROS2_HUMBLE)


def _make(name: str, *values: Any) -> Any:
    """A ROS message of this type from its fields in order."""
    return _STORE.types[name](*values)


def _header(time_ns: int) -> Any:
    return _make("std_msgs/msg/Header", _make("builtin_interfaces/msg/Time", *divmod(time_ns, 1_000_000_000)), "")


class Joints:
    """The joints of a robot, found by channel name: ``knee.position`` is the position of the joint ``knee``."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        observed = [str(channel["name"]) for channel in description["observations"]]
        applied = [str(channel["name"]) for channel in description["actions"]]
        self.position, self.velocity = _indices(observed, ("position",)), _indices(observed, ("velocity",))
        self.effort = _indices(applied, _EFFORTS)
        self.names = list(dict.fromkeys([*self.position, *self.velocity, *self.effort]))

    def state(self, step: Step, robot: int, time_ns: int) -> Any:
        """The JointState of one robot. A value without a channel is NaN."""
        rows = (
            (self.position, step.observation[robot]),
            (self.velocity, step.observation[robot]),
            (self.effort, step.action[robot]),
        )
        values = [
            np.array([row[joint[name]] if name in joint else math.nan for name in self.names if joint], np.float64)
            for joint, row in rows
        ]
        return _make(_JOINT_STATE, _header(time_ns), self.names, *values)


def _indices(channels: Sequence[str], kinds: Sequence[str]) -> dict[str, int]:
    parts = [(name.rpartition("."), index) for index, name in enumerate(channels)]
    return {joint: index for (joint, _, kind), index in parts if joint and kind in kinds}


def diagnostics(status: Status, time_ns: int) -> Any:
    """The DiagnosticArray of one Status."""
    values = [
        _make("diagnostic_msgs/msg/KeyValue", key, f"{value:g}" if isinstance(value, float) else str(value))
        for key, value in {**status.figures, **status.counters}.items()
    ]
    level = _ERROR if status.state == "failed" else _OK
    text = f"{status.state}: {status.detail}" if status.detail else status.state
    report = _make("diagnostic_msgs/msg/DiagnosticStatus", level, status.node, text, "", values)
    return _make(_DIAGNOSTICS, _header(time_ns), [report])


def export(session: Session, path: Path) -> Counter[str]:
    """Write the file; returns the number of messages by topic.

    Raises:
        SessionError: the recording is damaged.
        OSError: the file exists or cannot be written.
    """
    joints = {hello.name: Joints(hello.spec) for _, hello in session.robots() if hello.spec}
    counts: Counter[str] = Counter()
    with path.open("xb") as file:
        writer = Writer(file)
        writer.start("ros2")
        schemas = {
            name: writer.register_schema(name, "ros2msg", _STORE.generate_msgdef(name, ros_version=2)[0].encode())
            for name in (_JOINT_STATE, _DIAGNOSTICS)
        }
        channels: dict[str, int] = {}

        def write(topic: str, name: str, entry: Entry, message: Any) -> None:
            if topic not in channels:
                channels[topic] = writer.register_channel(topic, "cdr", schemas[name])
            data = bytes(_STORE.serialize_cdr(message, name))
            writer.add_message(channels[topic], entry.received, data, entry.published, counts[topic])
            counts[topic] += 1

        for entry in session.timed((Step.NAME, Status.NAME)):
            message = session.decode(entry)
            if isinstance(message, Status):
                write("/diagnostics", _DIAGNOSTICS, entry, diagnostics(message, entry.published))
            elif isinstance(message, Step) and message.source in joints:
                for robot in range(len(message.phase)):
                    topic = f"/{_name(message.source)}/robot_{robot}/joint_states"
                    write(topic, _JOINT_STATE, entry, joints[message.source].state(message, robot, entry.published))
        writer.finish()
    return counts


def _name(source: str) -> str:
    """A ROS name: letters, digits and underscores, and no digit first."""
    return re.sub(r"^(?=[0-9])", "_", re.sub(r"[^A-Za-z0-9_]", "_", source))
