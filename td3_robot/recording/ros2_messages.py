"""Converts messages to ROS 2 messages. ``export --format ros2`` and ``ros2 monitor`` share this conversion.

The types are those of ROS 2 Humble; later distributions have the same types. ``docs/how-to/view_recordings.md`` lists
the topics. Values keep the units of their channels; normalised values stay normalised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rosbags.typesys import Stores, get_typestore

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import ConfigError
from td3_robot.messages import Action, Evaluation, Hello, LifecycleChange, Message, Status, Step
from td3_robot.specs import Channel, Float32, Float64, RobotSpec

CONVERTED: tuple[type[Message], ...] = (Hello, Step, Action, Status, LifecycleChange, Evaluation)
"""The messages that :class:`Converter` reads. A Hello gives only the names of channels."""

_STORE = get_typestore(Stores.ROS2_HUMBLE)
_OK, _ERROR = 0, 2  # levels of a DiagnosticStatus
_LONGEST = 90  # characters of the name of a node or a channel
_SHOWN = 5  # number of channels that a remark names
_FIELDS = {
    **dict.fromkeys(("position", "pos", "angle"), "position"),
    **dict.fromkeys(("velocity", "vel", "speed"), "velocity"),
    **dict.fromkeys(("effort", "torque", "force"), "effort"),
}
"""The last word of a channel's name, mapped to a field of sensor_msgs/JointState."""
_UNITS = {
    **dict.fromkeys(("rad", "deg", "°", "m"), "position"),
    **dict.fromkeys(("rad/s", "deg/s", "°/s", "m/s"), "velocity"),
    **dict.fromkeys(("N·m", "N*m", "Nm", "N"), "effort"),
}
"""The unit of a channel, mapped to a field of sensor_msgs/JointState."""

Place = tuple[str, str]
"""A joint, and a field of sensor_msgs/JointState. The name of the only joint of a robot may be empty."""


class Draft(NamedTuple):
    """A ROS message that is not serialized yet.

    Attributes:
        topic: name of the topic.
        type: name of the type, for example ``std_msgs/msg/Float64``.
        message: the message, in the classes of rosbags.
        latched: whether a subscriber also gets the newest message from before it subscribed. Rare messages need this.
    """

    topic: str
    type: str
    message: Any
    latched: bool = False

    def cdr(self) -> bytes:
        """Return the serialized message."""
        return bytes(_STORE.serialize_cdr(self.message, self.type))


def definition(kind: str) -> bytes:
    """Return the definition of a ROS type, with the types that it uses."""
    return _STORE.generate_msgdef(kind, ros_version=2)[0].encode()


class Converter:
    """Converts the messages of a run, in their order."""

    def __init__(self) -> None:
        self._specs: dict[str, RobotSpec] = {}
        self._sources: dict[str, _Source] = {}
        self._namespaces: dict[str, str] = {}

    def learn(self, hello: Hello) -> None:
        """Take the names of a source's channels from its Hello."""
        if hello.role not in ROBOT_ROLES:
            return
        try:
            spec = RobotSpec.from_description(hello.spec)
        except ConfigError:  # for example a Hello that a server refused
            return
        if spec != self._specs.get(hello.name):
            self._specs[hello.name] = spec
            self._sources.pop(hello.name, None)

    def convert(self, message: Message, published: int) -> Iterator[Draft]:
        """Yield the ROS messages for a message.

        Args:
            message: any message. A message whose type is not in CONVERTED yields nothing.
            published: time at which the publisher sent the message, in ns since 1970.
        """
        if isinstance(message, Hello):
            self.learn(message)
        elif isinstance(message, Step):
            size = (*message.observation.shape, message.action.shape[1])
            yield from self._source(message.source, size).step(message, published)
        elif isinstance(message, Action):
            source = self._sources.get(message.source)
            if source and source.size[::2] == message.action.shape:
                yield from source.commands(message, published)
        elif isinstance(message, Status):
            level = _ERROR if message.state == "failed" else _OK
            values = {**message.figures, **message.counters}
            yield _diagnostic(message.node, level, message.state, message.detail, values, published)
        elif isinstance(message, LifecycleChange):
            level = _ERROR if message.state == "fault" else _OK
            name, values = f"{message.node} lifecycle", {"previous": message.previous}
            yield _diagnostic(name, level, message.state, message.reason, values, published)
            state = _draft(f"{self._namespace(message.node)}/state", "std_msgs/msg/String", message.state)
            yield state._replace(latched=True)
        elif isinstance(message, Evaluation):
            returns = _array("/evaluation/returns", _layout(["episode"], len(message.returns)), message.returns)
            yield returns._replace(latched=True)

    def remarks(self) -> list[str]:
        """Return a line for each source with channels that have no place in a JointState."""
        return [f"{name}: {remark}" for name, source in self._sources.items() if (remark := source.remark())]

    def _source(self, name: str, size: tuple[int, int, int]) -> _Source:
        known = self._sources.get(name)
        if known is None or known.size != size:
            known = _Source(self._namespace(name), self._specs.get(name), size)
            self._sources[name] = known
        return known

    def _namespace(self, node: str) -> str:
        """Return the ROS namespace of a node. No two nodes have the same namespace."""
        if node not in self._namespaces:
            self._namespaces[node] = f"/{_free(ros_name(node), {it[1:] for it in self._namespaces.values()})}"
        return self._namespaces[node]


class _Source:
    """The robots of a source: their topics, channels and joints.

    Args:
        namespace: ROS namespace of the source.
        spec: the robot's specification; None if it is not known.
        size: numbers of robots, of observation channels and of action channels.
    """

    def __init__(self, namespace: str, spec: RobotSpec | None, size: tuple[int, int, int]) -> None:
        self.size = size
        self._namespace = namespace
        self._known = spec is not None and (spec.observation_size, spec.action_size) == size[1:]
        if spec is None or not self._known:
            spec = RobotSpec("robot", _numbered(size[1]), _numbered(size[2]), 1.0)
        self._joints = _Joints(spec)
        self._robots = [f"{namespace}/robot_{robot}" for robot in range(size[0])]
        names = {
            kind: [channel.name for channel in channels]
            for kind, channels in (("observation", spec.observations), ("action", spec.actions))
        }
        self._layouts = {kind: _layout(channels, len(channels)) for kind, channels in names.items()}
        self._topics = {kind: _channel_topics(kind, channels) for kind, channels in names.items()}

    def step(self, step: Step, published: int) -> Iterator[Draft]:
        """Yield the messages for a Step."""
        yield _draft(f"{self._namespace}/action_origin", "std_msgs/msg/UInt32", step.origin)
        yield _draft(f"{self._namespace}/weights_version", "std_msgs/msg/UInt64", step.weights_version)
        for robot, base in enumerate(self._robots):
            rows = {"observation": step.observation[robot], "action": step.action[robot]}
            if self._joints.measured:
                state = self._joints.state(rows["observation"], rows["action"], published)
                yield Draft(f"{base}/joint_states", _JOINT_STATE, state)
            for kind, row in rows.items():
                yield _array(f"{base}/{kind}", self._layouts[kind], row)
                for topic, value in zip(self._topics[kind], row.tolist(), strict=True):
                    yield _draft(f"{base}/{topic}", "std_msgs/msg/Float64", value)
            yield _draft(f"{base}/reward", "std_msgs/msg/Float64", float(step.reward[robot]))
            yield _draft(f"{base}/episode", "std_msgs/msg/UInt64", int(step.episode[robot]))
            yield _draft(f"{base}/episode_step", "std_msgs/msg/UInt32", int(step.episode_step[robot]))
            yield _draft(f"{base}/phase", "std_msgs/msg/UInt8", int(step.phase[robot]))

    def commands(self, action: Action, published: int) -> Iterator[Draft]:
        """Yield the messages for an Action."""
        for base, row in zip(self._robots, action.action, strict=True):
            yield _array(f"{base}/commands", self._layouts["action"], row)
            if self._joints.driven:
                yield Draft(f"{base}/joint_commands", _JOINT_STATE, self._joints.command(row, published))

    def remark(self) -> str:
        """Return why channels have no place in a JointState. The text is empty if each channel has a place."""
        unmapped = self._joints.unmapped
        if not self._known:
            return f"no specification names its channels; {self._robots[0]}/observation and /action have numbers"
        if not unmapped:
            return ""
        what = f"{len(unmapped)} of {self.size[1] + self.size[2]} channels are in no joint message"
        if not self._joints.measured:
            what = f"no {self._robots[0]}/joint_states, because no channel names a joint as JOINT.position does"
        shown = ", ".join(unmapped[:_SHOWN]) + (", …" if len(unmapped) > _SHOWN else "")
        return f"{what}: {shown}; the topics observation and action hold every channel"


class _Joints:
    """The joints of a robot, found by the names and units of its channels.

    Attributes:
        measured: names of the joints in joint_states; empty without any position or velocity.
        driven: names of the joints that actions drive.
        unmapped: names of the channels that belong to no joint.
    """

    def __init__(self, spec: RobotSpec) -> None:
        places = [_driven_place(channel) for channel in spec.actions]
        self._applied = _indices(places, spec.name)
        driven = {place[0] for place in places if place}
        if len(spec.actions) == 1:
            driven.add("")  # the action drives the only joint, whatever the action's name
        places = [_measured_place(channel, driven) for channel in spec.observations]
        self._observed = _indices(places, spec.name)
        position, velocity = self._observed["position"], self._observed["velocity"]
        self._effort_observed = bool(self._observed["effort"])
        effort = (self._observed if self._effort_observed else self._applied)["effort"]
        self._state_fields = {"position": position, "velocity": velocity, "effort": effort}
        self.measured = list(dict.fromkeys([*position, *velocity, *effort])) if position or velocity else []
        self.driven = list(dict.fromkeys(joint for joints in self._applied.values() for joint in joints))
        self.unmapped = [
            channel.name
            for channels, fields in ((spec.observations, self._observed), (spec.actions, self._applied))
            for index, channel in enumerate(channels)
            if not any(index in joints.values() for joints in fields.values())
        ]

    def state(self, observation: Float32, action: Float32, published: int) -> Any:
        """Return the JointState of a robot."""
        rows = observation, observation, observation if self._effort_observed else action
        return _joint_state(self.measured, self._state_fields, rows, published)

    def command(self, action: Float32, published: int) -> Any:
        """Return a JointState with the commands for a robot."""
        return _joint_state(self.driven, self._applied, (action, action, action), published)


def _driven_place(channel: Channel) -> Place | None:
    """Return the joint that an action channel drives, and the field of the command; None without a joint.

    ``hip.torque`` and ``hip_torque`` drive ``hip``. For a name without such a word, the unit decides.
    """
    joint, _, word = channel.name.replace("_", ".").rpartition(".")
    if word in _FIELDS:
        return channel.name[: len(joint)], _FIELDS[word]
    return (channel.name, _UNITS[channel.unit]) if channel.unit in _UNITS else None


def _measured_place(channel: Channel, driven: Collection[str]) -> Place | None:
    """Return the joint and field of an observation channel; None without a joint.

    ``hip.position`` always belongs to the joint ``hip``. Other names belong to a joint only if an action drives it,
    because a robot also measures heights, forces on its feet and angles of its body.
    """
    joint, _, word = channel.name.rpartition(".")
    if joint and _FIELDS.get(word) in ("position", "velocity"):
        return joint, _FIELDS[word]
    place = _driven_place(channel)
    return place if place and place[0] in driven else None


def _indices(places: Iterable[Place | None], robot: str) -> dict[str, dict[str, int]]:
    """Return the index of the channel of each joint, for each field. The robot names a joint without a name."""
    result: dict[str, dict[str, int]] = {"position": {}, "velocity": {}, "effort": {}}
    for index, place in enumerate(places):
        if place:
            result[place[1]].setdefault(place[0] or robot, index)
    return result


def _numbered(count: int) -> tuple[Channel, ...]:
    return tuple(Channel(f"channel_{index}", "", -1.0, 1.0) for index in range(count))


def ros_name(text: str) -> str:
    """Return a valid ROS name for a text. ``/`` separates its parts.

    A part has letters, digits and single underscores. It begins with a letter, because ROS tools hide topics that begin
    with an underscore. ROS limits the length of topics.
    """
    parts = (re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_") for part in text.split("/"))
    return "/".join(part if part[:1].isalpha() else f"x{part}" for part in parts)[:_LONGEST].rstrip("/")


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number at its end if it is taken."""
    result, number = name, 2
    while result in taken:
        result, number = f"{name}_{number}", number + 1
    return result


def _channel_topics(kind: str, names: Sequence[str]) -> list[str]:
    """Return the topic of each channel. A dot in the name separates parts of the topic."""
    topics: list[str] = []
    for name in names:
        topics.append(_free(f"{kind}/{ros_name(name.replace('.', '/'))}", topics))
    return topics


# -- ROS messages ----------------------------------------------------------------------------------------------------

_JOINT_STATE = "sensor_msgs/msg/JointState"


def _make(kind: str, *values: Any) -> Any:
    """Return a ROS message of a type, from its fields in their order."""
    return _STORE.types[kind](*values)


def _draft(topic: str, kind: str, value: Any) -> Draft:
    """Return the draft of a message with one field."""
    return Draft(topic, kind, _make(kind, value))


def _header(published: int) -> Any:
    return _make("std_msgs/msg/Header", _make("builtin_interfaces/msg/Time", *divmod(published, 1_000_000_000)), "")


def _layout(names: Sequence[str], size: int) -> Any:
    """Return the layout of an array. Its label lists the names of the values."""
    dimension = _make("std_msgs/msg/MultiArrayDimension", ", ".join(names), size, size)
    return _make("std_msgs/msg/MultiArrayLayout", [dimension], 0)


def _array(topic: str, layout: Any, values: Float32 | Float64) -> Draft:
    kind = "std_msgs/msg/Float64MultiArray"
    return Draft(topic, kind, _make(kind, layout, values.astype(np.float64)))


def _joint_state(
    names: list[str], fields: Mapping[str, Mapping[str, int]], rows: Sequence[Float32], published: int
) -> Any:
    """Return a JointState. A joint without a value gets NaN; a field without values is empty.

    ``fields`` and ``rows`` have an item for position, velocity and effort: the index of each joint's value, the values.
    """
    values = [
        np.array([row[joints[name]] if name in joints else math.nan for name in names if joints], np.float64)
        for joints, row in zip(fields.values(), rows, strict=True)
    ]
    return _make(_JOINT_STATE, _header(published), names, *values)


def _diagnostic(node: str, level: int, state: str, detail: str, values: Mapping[str, Any], published: int) -> Draft:
    """Return the draft of a DiagnosticArray about one node."""
    pairs = [
        _make("diagnostic_msgs/msg/KeyValue", key, f"{value:g}" if isinstance(value, float) else str(value))
        for key, value in values.items()
    ]
    text = f"{state}: {detail}" if detail else state
    kind = "diagnostic_msgs/msg/DiagnosticArray"
    report = _make("diagnostic_msgs/msg/DiagnosticStatus", level, node, text, "", pairs)
    return Draft("/diagnostics", kind, _make(kind, _header(published), [report]))
