"""Converts messages to ROS 2 messages. ``export --format ros2`` and ``ros2 monitor`` share this conversion.

The types are those of ROS 2 Humble; later distributions have the same types. ``docs/how-to/view_recordings.md`` lists
the topics. Values keep the units of their channels; normalised values stay normalised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from rosbags.typesys import Stores, get_typestore

from td3_robot.messages import Action, Evaluation, Hello, LifecycleChange, Message, Status, Step
from td3_robot.recording import viewer_file
from td3_robot.recording.entries import Entry
from td3_robot.recording.joints import Joints
from td3_robot.recording.values import robot_of
from td3_robot.recording.viewer_file import Schema
from td3_robot.specs import Channel, Float32, Float64, RobotSpec

_STORE = get_typestore(Stores.ROS2_HUMBLE)
_OK, _ERROR = 0, 2  # levels of a DiagnosticStatus
_LONGEST = 90  # maximum length of the name of a node or a channel, in characters
_SHOWN = 5  # maximum number of channels that a remark lists


class Draft(NamedTuple):
    """A ROS message that is not serialized yet.

    Attributes:
        type: name of the type, for example ``std_msgs/msg/Float64``.
        message: the message, in the classes of rosbags.
        latched: whether a new subscriber at once gets the newest message of the topic. Rare messages need this.
    """

    topic: str
    type: str
    message: Any
    latched: bool = False

    def schema(self) -> Schema:
        return Schema(self.type, "ros2msg", _STORE.generate_msgdef(self.type, ros_version=2)[0].encode(), "cdr")

    def data(self) -> bytes:
        return bytes(_STORE.serialize_cdr(self.message, self.type))


class Converter(viewer_file.Converter):
    profile = "ros2"
    converted: ClassVar[Sequence[type[Message]]] = (Hello, Step, Action, Status, LifecycleChange, Evaluation)

    def __init__(self) -> None:
        self._specs: dict[str, RobotSpec] = {}
        self._sources: dict[str, _Source] = {}
        self._namespaces: dict[str, str] = {}

    def learn(self, hello: Hello) -> None:
        spec = robot_of(hello)
        if spec and spec != self._specs.get(hello.name):
            self._specs[hello.name] = spec
            self._sources.pop(hello.name, None)

    def convert(self, entry: Entry, message: Message) -> Iterator[Draft]:
        published = entry.published  # ns since 1970
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
        spec: the robot's specification; None if it is not known.
        size: the number of robots, the number of observation channels and the number of action channels.
    """

    def __init__(self, namespace: str, spec: RobotSpec | None, size: tuple[int, int, int]) -> None:
        self.size = size
        self._namespace = namespace
        self._known = spec is not None and (spec.observation_size, spec.action_size) == size[1:]
        if spec is None or not self._known:
            spec = RobotSpec("robot", _numbered(size[1]), _numbered(size[2]), 1.0)
        self._joints = Joints(spec)
        self._robots = [f"{namespace}/robot_{robot}" for robot in range(size[0])]
        names = {
            kind: [channel.name for channel in channels]
            for kind, channels in (("observation", spec.observations), ("action", spec.actions))
        }
        self._layouts = {kind: _layout(channels, len(channels)) for kind, channels in names.items()}
        self._topics = {kind: _channel_topics(kind, channels) for kind, channels in names.items()}

    def step(self, step: Step, published: int) -> Iterator[Draft]:
        yield _draft(f"{self._namespace}/action_origin", "std_msgs/msg/UInt32", step.origin)
        yield _draft(f"{self._namespace}/weights_version", "std_msgs/msg/UInt64", step.weights_version)
        for robot, base in enumerate(self._robots):
            rows = {"observation": step.observation[robot], "action": step.action[robot]}
            if self._joints.measured:
                state = self._joints.state(rows["observation"], rows["action"])
                yield Draft(f"{base}/joint_states", _JOINT_STATE, _joint_state(self._joints.measured, state, published))
            for kind, row in rows.items():
                yield _array(f"{base}/{kind}", self._layouts[kind], row)
                for topic, value in zip(self._topics[kind], row.tolist(), strict=True):
                    yield _draft(f"{base}/{topic}", "std_msgs/msg/Float64", value)
            yield _draft(f"{base}/reward", "std_msgs/msg/Float64", float(step.reward[robot]))
            yield _draft(f"{base}/episode", "std_msgs/msg/UInt64", int(step.episode[robot]))
            yield _draft(f"{base}/episode_step", "std_msgs/msg/UInt32", int(step.episode_step[robot]))
            yield _draft(f"{base}/phase", "std_msgs/msg/UInt8", int(step.phase[robot]))

    def commands(self, action: Action, published: int) -> Iterator[Draft]:
        for base, row in zip(self._robots, action.action, strict=True):
            yield _array(f"{base}/commands", self._layouts["action"], row)
            if self._joints.driven:
                command = _joint_state(self._joints.driven, self._joints.command(row), published)
                yield Draft(f"{base}/joint_commands", _JOINT_STATE, command)

    def remark(self) -> str:
        """Return a remark if the channels have no names, or if some channels are in no joint message.

        Otherwise, return an empty text.
        """
        unmapped = self._joints.unmapped
        if not self._known:
            return "no matching specification is known, so the channels have the names channel_0, channel_1, …"
        if not unmapped:
            return ""
        what = f"{len(unmapped)} of {self.size[1] + self.size[2]} channels are in no joint message"
        if not self._joints.measured:
            what = (
                f"no {self._robots[0]}/joint_states, because no observation has a name like JOINT.position; "
                "channels in no joint message"
            )
        shown = ", ".join(unmapped[:_SHOWN]) + (", …" if len(unmapped) > _SHOWN else "")
        return f"{what}: {shown}; the topics observation and action hold every channel"


def _numbered(count: int) -> tuple[Channel, ...]:
    return tuple(Channel(f"channel_{index}", "", -1.0, 1.0) for index in range(count))


def ros_name(text: str) -> str:
    """Return a valid ROS name for a text. ``/`` separates its parts.

    A part has letters, digits and single underscores. It begins with a letter: ROS forbids a digit there, and ROS tools
    hide topics that begin with an underscore. The name has at most 90 characters, because ROS limits the length of
    topics.
    """
    parts = (re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_") for part in text.split("/"))
    return "/".join(part if part[:1].isalpha() else f"x{part}" for part in parts)[:_LONGEST].rstrip("/")


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name. If the name is taken, add a number at the end."""
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
    return _STORE.types[kind](*values)


def _draft(topic: str, kind: str, value: Any) -> Draft:
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


def _joint_state(names: Sequence[str], values: Iterable[Float64], published: int) -> Any:
    """Return a JointState. ``values`` are the positions, velocities and efforts; see :class:`Joints`."""
    return _make(_JOINT_STATE, _header(published), list(names), *values)


def _diagnostic(node: str, level: int, state: str, detail: str, values: Mapping[str, Any], published: int) -> Draft:
    pairs = [
        _make("diagnostic_msgs/msg/KeyValue", key, f"{value:g}" if isinstance(value, float) else str(value))
        for key, value in values.items()
    ]
    text = f"{state}: {detail}" if detail else state
    kind = "diagnostic_msgs/msg/DiagnosticArray"
    report = _make("diagnostic_msgs/msg/DiagnosticStatus", level, node, text, "", pairs)
    return Draft("/diagnostics", kind, _make(kind, _header(published), [report]))
