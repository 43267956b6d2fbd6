"""A recording as a second MCAP file in ROS 2 types: what robots did as JointState, what nodes report as diagnostics.

Layouts: sensor_msgs/JointState, diagnostic_msgs/DiagnosticArray and std_msgs/Header of ROS 2 Humble. Encoding: CDR as
in OMG DDSI-RTPS 2.5, section 10, little-endian. Positions, velocities and efforts are the numbers of the channels of
those names, in the units of these: what a task normalises stays normalised.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcap.writer import Writer

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.messages import Hello, Status, Step
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session

_LINE = "=" * 80
_HEADER = f"""{_LINE}
MSG: std_msgs/Header
builtin_interfaces/Time stamp
string frame_id
{_LINE}
MSG: builtin_interfaces/Time
int32 sec
uint32 nanosec
"""
JOINT_STATE = f"""std_msgs/Header header
string[] name
float64[] position
float64[] velocity
float64[] effort
{_HEADER}"""
DIAGNOSTICS = f"""std_msgs/Header header
diagnostic_msgs/DiagnosticStatus[] status
{_HEADER}{_LINE}
MSG: diagnostic_msgs/DiagnosticStatus
byte OK=0
byte WARN=1
byte ERROR=2
byte STALE=3
byte level
string name
string message
string hardware_id
diagnostic_msgs/KeyValue[] values
{_LINE}
MSG: diagnostic_msgs/KeyValue
string key
string value
"""
_OK, _ERROR = 0, 2
_EFFORTS = ("torque", "effort", "force")


class Cdr:
    """Writes one message; numbers are aligned to their size, counted from behind the encapsulation header."""

    def __init__(self) -> None:
        self._octets = bytearray()

    def number(self, code: str, value: float) -> None:
        size = struct.calcsize(code)
        self._octets += bytes(-len(self._octets) % size)
        self._octets += struct.pack(f"<{code}", value)

    def text(self, value: str) -> None:
        octets = value.encode() + b"\0"
        self.number("I", len(octets))
        self._octets += octets

    def texts(self, values: Sequence[str]) -> None:
        self.number("I", len(values))
        for value in values:
            self.text(value)

    def doubles(self, values: Sequence[float]) -> None:
        self.number("I", len(values))
        for value in values:
            self.number("d", value)

    def header(self, time_ns: int) -> None:
        seconds, rest = divmod(time_ns, 1_000_000_000)
        self.number("i", seconds)
        self.number("I", rest)
        self.text("")

    def message(self) -> bytes:
        return b"\x00\x01\x00\x00" + bytes(self._octets)


class Joints:
    """Which channels of a robot are what of which joint: ``knee.position`` is the position of the joint ``knee``."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        observed = [str(channel["name"]) for channel in description["observations"]]
        applied = [str(channel["name"]) for channel in description["actions"]]
        self.position, self.velocity = _indices(observed, ("position",)), _indices(observed, ("velocity",))
        self.effort = _indices(applied, _EFFORTS)
        self.names = list(dict.fromkeys([*self.position, *self.velocity, *self.effort]))

    def state(self, step: Step, robot: int, time_ns: int) -> bytes:
        """The JointState of one robot; what a joint has no channel for is not a number."""
        cdr = Cdr()
        cdr.header(time_ns)
        cdr.texts(self.names)
        for indices, row in (
            (self.position, step.observation[robot]),
            (self.velocity, step.observation[robot]),
            (self.effort, step.action[robot]),
        ):
            found = [float(row[indices[name]]) if name in indices else math.nan for name in self.names]
            cdr.doubles(found if indices else [])
        return cdr.message()


def _indices(channels: Sequence[str], kinds: Sequence[str]) -> dict[str, int]:
    parts = [(name.rpartition("."), index) for index, name in enumerate(channels)]
    return {joint: index for (joint, _, kind), index in parts if joint and kind in kinds}


def diagnostics(status: Status, time_ns: int) -> bytes:
    """The DiagnosticArray of one Status."""
    cdr = Cdr()
    cdr.header(time_ns)
    cdr.number("I", 1)
    cdr.number("B", _ERROR if status.state == "failed" else _OK)
    cdr.text(status.node)
    cdr.text(f"{status.state}: {status.detail}" if status.detail else status.state)
    cdr.text("")
    values = {**status.figures, **status.counters}
    cdr.number("I", len(values))
    for key, value in values.items():
        cdr.text(key)
        cdr.text(f"{value:g}" if isinstance(value, float) else str(value))
    return cdr.message()


def export(session: Session, path: Path) -> Counter[str]:
    """Write the file; messages by topic.

    Raises:
        SessionError: the recording is damaged.
        OSError: the file exists or cannot be written.
    """
    joints: dict[str, Joints] = {}
    for _, message in session.messages((Hello.NAME,)):
        if isinstance(message, Hello) and message.role in ROBOT_ROLES and message.spec:
            joints[message.name] = Joints(message.spec)
    counts: Counter[str] = Counter()
    with path.open("xb") as file:
        writer = Writer(file)
        writer.start("ros2")
        schemas = {
            Step: writer.register_schema("sensor_msgs/msg/JointState", "ros2msg", JOINT_STATE.encode()),
            Status: writer.register_schema("diagnostic_msgs/msg/DiagnosticArray", "ros2msg", DIAGNOSTICS.encode()),
        }
        channels: dict[str, int] = {}

        def write(topic: str, kind: type, entry: Entry, data: bytes) -> None:
            if topic not in channels:
                channels[topic] = writer.register_channel(topic, "cdr", schemas[kind])
            writer.add_message(channels[topic], entry.received, data, entry.published, counts[topic])
            counts[topic] += 1

        for entry in session.timed((Step.NAME, Status.NAME)):
            message = session.decode(entry)
            if isinstance(message, Status):
                write("/diagnostics", Status, entry, diagnostics(message, entry.published))
            elif isinstance(message, Step) and message.source in joints:
                for robot in range(len(message.phase)):
                    topic = f"/{_name(message.source)}/robot_{robot}/joint_states"
                    write(topic, Step, entry, joints[message.source].state(message, robot, entry.published))
        writer.finish()
    return counts


def _name(source: str) -> str:
    """A ROS name: letters, digits and underscores, no digit first."""
    return re.sub(r"^(?=[0-9])", "_", re.sub(r"[^A-Za-z0-9_]", "_", source))
