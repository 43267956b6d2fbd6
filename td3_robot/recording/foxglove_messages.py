"""Converts messages to those of Foxglove, for ``export --format foxglove`` and ``monitor --foxglove``.

``docs/how-to/view_recordings.md`` lists the topics. Values keep the units of their channels; normalised values stay
normalised. Sources: https://docs.foxglove.dev/docs/sdk/schemas and
https://docs.foxglove.dev/docs/getting-started/frameworks/custom#json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from foxglove import messages as fox

from td3_robot.messages import (
    Action,
    Command,
    Evaluation,
    Hello,
    LifecycleChange,
    Message,
    Phase,
    Reply,
    Status,
    Step,
    Teleop,
    Throttle,
    Weights,
)
from td3_robot.recording import viewer_file
from td3_robot.recording.entries import Entry
from td3_robot.recording.joints import Joints
from td3_robot.recording.poses import Poses, Shape, known
from td3_robot.recording.values import Names, by_topic, names_of, robot_of
from td3_robot.recording.viewer_file import Schema
from td3_robot.specs import Float64, RobotSpec

LAYOUT = Path(__file__).with_name("foxglove_layout.json")
"""A layout of panels for the first robot of a training."""
_WORLD = "world"  # name of the frame that does not move
_APART = 2.0  # m between the tracks of two robots
_SCENE_EVERY = 60  # steps between two messages with the shapes of the links; a new viewer waits for the next one
_COLOR = fox.Color(r=0.9, g=0.6, b=0.3, a=1.0)


class Draft(NamedTuple):
    """A message for Foxglove that is not serialized yet.

    Attributes:
        name: name of the type, for example ``td3_robot.Step`` or ``foxglove.JointStates``.
        message: a map of values, or a message of the Foxglove SDK.
    """

    topic: str
    name: str
    message: Any

    def schema(self) -> Schema:
        if isinstance(self.message, dict):
            return Schema(self.name, "jsonschema", json.dumps(_schema(self.message)).encode(), "json")
        schema = type(self.message).get_schema()
        return Schema(schema.name, schema.encoding, schema.data, "protobuf")

    def data(self) -> bytes:
        """Return the serialized message. In JSON, NaN and infinity become null."""
        return msgspec.json.encode(self.message) if isinstance(self.message, dict) else bytes(self.message.encode())


class Converter(viewer_file.Converter):
    converted: ClassVar[tuple[type[Message], ...]] = (
        *(Hello, Step, Action, Throttle, Weights, Evaluation, Status),
        *(Command, Teleop, Reply, LifecycleChange),
    )

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self._logged: dict[str, tuple[str, str]] = {}  # newest state and detail of each node, and of its lifecycle

    def learn(self, hello: Hello) -> None:
        spec, source = robot_of(hello), self._sources.get(hello.name)
        if spec and (source is None or source.spec != spec):
            self._sources[hello.name] = _Source(spec, names_of(hello) or {})

    def convert(self, entry: Entry, message: Message) -> Iterator[Draft]:
        if not isinstance(message, self.converted):
            return
        if isinstance(message, Hello):
            self.learn(message)
        source = self._sources.get(getattr(message, "source", ""))
        for topic, values in by_topic(entry, message, source.names if source else {}):
            shown = {key: len(value) if isinstance(value, bytes) else value for key, value in values.items()}
            yield Draft(f"/{topic}", f"td3_robot.{type(message).__name__}", shown)
        time = fox.Timestamp(*divmod(entry.published, 1_000_000_000))
        if source and isinstance(message, Step):
            yield from self._drawn(source, message, time)
        elif isinstance(message, Status):
            yield from self._log(time, message.node, message.state, message.detail, failed=message.state == "failed")
        elif isinstance(message, LifecycleChange):
            name = f"{message.node} lifecycle"
            yield from self._log(time, name, message.state, message.reason, failed=message.state == "fault")

    def layout(self) -> bytes:
        """Return the shipped layout, with the name of the first robot in place of ``sim-0``."""
        first = next((source.robots[0] for source in self._sources.values() if source.robots), None)
        if first is None:
            return LAYOUT.read_bytes()
        new = {"sim-0/step": first.steps, "sim-0/": f"{first.name}/"}
        return re.sub("|".join(new), lambda found: new[found[0]], LAYOUT.read_text(encoding="utf-8")).encode()

    def _drawn(self, source: _Source, step: Step, time: fox.Timestamp) -> Iterator[Draft]:
        spec, (count, size) = source.spec, step.observation.shape
        if size != spec.observation_size or step.action.shape[1] != spec.action_size:
            return
        if len(source.robots) != count:
            source.robots.clear()
            before = sum(len(other.robots) for other in self._sources.values())
            source.robots.extend(
                _Robot(step.source, f"/{index}" if count > 1 else "", spec, _APART * (before + index))
                for index in range(count)
            )
        for index, robot in enumerate(source.robots):
            yield from robot.joints(step, index, time)
            yield from robot.links(step, index, time)

    def _log(self, time: fox.Timestamp, name: str, state: str, detail: str, *, failed: bool) -> Iterator[Draft]:
        """Yield a line of the log if the state or its detail is new."""
        if self._logged.get(name) == (state, detail):
            return
        self._logged[name] = (state, detail)
        text = f"{state}: {detail}" if detail else state
        level = fox.LogLevel.Error if failed else fox.LogLevel.Info
        yield Draft("/log", "foxglove.Log", fox.Log(timestamp=time, level=level, message=text, name=name))


@dataclass
class _Source:
    """A simulator or driver: the specification and the channel names of its robots, and the robots."""

    spec: RobotSpec
    names: Names
    robots: list[_Robot] = field(default_factory=list)


class _Robot:
    """One robot of a source: its joints, and its links if they are known.

    Args:
        source: name of the simulator or driver.
        end: a slash and the index of the robot in its source; empty for the only robot of a source.
        track: the robot's y coordinate at the start of each episode, in m. Robots with different tracks stand side by
            side.

    Attributes:
        name: name of the robot; its topics and frames begin with this name.
        steps: topic of its Steps.
    """

    def __init__(self, source: str, end: str, spec: RobotSpec, track: float) -> None:
        self.name, self.steps = source + end, f"{source}/step{end}"
        self._joints = Joints(spec)
        self._poses = Poses(spec) if known(spec) else None
        self._track = np.array([0.0, track, 0.0])
        self._steps = 0

    def joints(self, step: Step, index: int, time: fox.Timestamp) -> Iterator[Draft]:
        if not self._joints.measured:
            return
        fields = self._joints.state(step.observation[index], step.action[index])
        columns = {name: row for name, row in zip(("position", "velocity", "effort"), fields, strict=True) if row.size}
        joints = [
            fox.JointState(name=name, **{field: float(column[place]) for field, column in columns.items()})
            for place, name in enumerate(self._joints.measured)
        ]
        message = fox.JointStates(timestamp=time, joints=joints)
        yield Draft(f"/{self.name}/joint_states", "foxglove.JointStates", message)

    def links(self, step: Step, index: int, time: fox.Timestamp) -> Iterator[Draft]:
        if self._poses is None:
            return
        pose = self._poses.step(step.observation[index], first=step.phase[index] == Phase.FIRST)
        frames = [f"{self.name}/{link.name}" for link in self._poses.robot.links]
        transforms = [
            fox.FrameTransform(
                timestamp=time,
                parent_frame_id=_WORLD,
                child_frame_id=frame,
                translation=_vector(position + self._track),
                rotation=_quaternion(rotation),
            )
            for frame, position, rotation in zip(frames, pose.positions[0], pose.rotations[0], strict=True)
        ]
        yield Draft("/tf", "foxglove.FrameTransforms", fox.FrameTransforms(transforms=transforms))
        if self._steps % _SCENE_EVERY == 0:
            links = zip(frames, self._poses.robot.links, strict=True)
            entities = [_entity(frame, link.shapes, time) for frame, link in links]
            yield Draft(f"/{self.name}/scene", "foxglove.SceneUpdate", fox.SceneUpdate(entities=entities))
        self._steps += 1


def _entity(frame: str, shapes: Sequence[Shape], time: fox.Timestamp) -> fox.SceneEntity:
    cylinders, spheres = [], []
    for shape in shapes:
        begin, end, wide = np.array(shape.begin), np.array(shape.end), 2 * shape.radius
        length = float(np.linalg.norm(end - begin))
        if length > 0:
            pose = fox.Pose(position=_vector((begin + end) / 2), orientation=_along((end - begin) / length))
            size = fox.Vector3(x=wide, y=wide, z=length)
            cylinders.append(fox.CylinderPrimitive(pose=pose, size=size, bottom_scale=1.0, top_scale=1.0, color=_COLOR))
        for place in (begin, end) if length > 0 else (begin,):
            pose = fox.Pose(position=_vector(place), orientation=fox.Quaternion(x=0.0, y=0.0, z=0.0, w=1.0))
            size = fox.Vector3(x=wide, y=wide, z=wide)
            spheres.append(fox.SpherePrimitive(pose=pose, size=size, color=_COLOR))
    return fox.SceneEntity(
        timestamp=time, frame_id=frame, id=frame, frame_locked=True, cylinders=cylinders, spheres=spheres
    )


def _vector(values: Float64) -> fox.Vector3:
    x, y, z = values.tolist()
    return fox.Vector3(x=x, y=y, z=z)


def _along(direction: Float64) -> fox.Quaternion:
    """Return the rotation that turns the z axis into a direction (a unit vector)."""
    x, y, z = direction.tolist()
    if z < -1 + 1e-9:
        return fox.Quaternion(x=1.0, y=0.0, z=0.0, w=0.0)
    w = math.sqrt((1 + z) / 2)  # half of the angle: cos(a / 2) = sqrt((1 + cos a) / 2)
    return fox.Quaternion(x=-y / (2 * w), y=x / (2 * w), z=0.0, w=w)


def _quaternion(matrix: Float64) -> fox.Quaternion:
    """Return the quaternion of a rotation matrix (Shepperd's method: begin with the largest component)."""
    xx, yy, zz = (float(value) for value in np.diagonal(matrix))
    squares = np.array([1 + xx - yy - zz, 1 - xx + yy - zz, 1 - xx - yy + zz, 1 + xx + yy + zz])
    m = matrix.tolist()
    rows = (
        (squares[0], m[0][1] + m[1][0], m[0][2] + m[2][0], m[2][1] - m[1][2]),
        (m[0][1] + m[1][0], squares[1], m[1][2] + m[2][1], m[0][2] - m[2][0]),
        (m[0][2] + m[2][0], m[1][2] + m[2][1], squares[2], m[1][0] - m[0][1]),
        (m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], squares[3]),
    )
    largest = int(np.argmax(squares))
    x, y, z, w = (float(value) / (2 * math.sqrt(squares[largest])) for value in rows[largest])
    return fox.Quaternion(x=x, y=y, z=z, w=w)


def _schema(value: Any) -> dict[str, Any]:
    """Return a JSON Schema of a value, so that viewers can list its fields before the first message."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: _schema(item) for key, item in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": _schema(value[0]) if value else {}}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": kinds[type(value)]} if type(value) in kinds else {}
