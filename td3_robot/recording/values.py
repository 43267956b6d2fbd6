"""Gives each number in a message a name: its field, robot and channel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import ConfigError
from td3_robot.messages import Hello, Message, wire_fields
from td3_robot.recording.entries import Entry
from td3_robot.specs import RobotSpec

Names = Mapping[str, Sequence[str]]
"""Channel names by array dimension: O for observations, A for actions."""


def robot_of(message: Message) -> RobotSpec | None:
    """The robot in the Hello of a source; None for any other message, and for a specification that is not valid."""
    if not isinstance(message, Hello) or message.role not in ROBOT_ROLES:
        return None
    with contextlib.suppress(ConfigError):
        return RobotSpec.from_description(message.spec)
    return None


def names_of(message: Message) -> Names | None:
    """The channel names in the Hello of a source. None where :func:`robot_of` returns None."""
    if (spec := robot_of(message)) is None:
        return None
    return {size: [it.name for it in channels] for size, channels in (("O", spec.observations), ("A", spec.actions))}


def by_topic(entry: Entry, message: Message, names: Names) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a topic for viewers, and a map of field values, for each robot in a message.

    The topic is ``PUBLISHER/TOPIC``. If the message is about a source that is not the publisher, the topic is
    ``PUBLISHER/TOPIC/SOURCE``. If there are several robots, the topic ends with ``/`` and the robot's index. A message
    that is not about robots yields one map. In this map, each array is a list.
    """
    source = getattr(message, "source", entry.publisher)
    topic = "/".join((entry.publisher, entry.topic, *((source,) if source != entry.publisher else ())))
    shapes = [wire.shape for wire in wire_fields(type(message)).values() if wire.kind == "array"]
    about_robots = not shapes or shapes[0][0] == "N"
    maps = list(rows(message, names)) if about_robots else [whole(message, {})]
    for index, values in enumerate(maps):
        yield topic if len(maps) == 1 else f"{topic}/{index}", values


def rows(message: Message, names: Names) -> Iterator[dict[str, Any]]:
    """Yield a map of field values for each robot or episode in a message, or for each channel of a MotorCommand.

    A message without arrays yields one map. In each map, a 1-D array gives one number. A 2-D array gives an inner map
    from channel names (or indices) to numbers. Other fields have the same value in every map.
    """
    wires = wire_fields(type(message))
    arrays = {name: wire.shape for name, wire in wires.items() if wire.kind == "array"}
    count = len(getattr(message, next(iter(arrays)))) if arrays else 1
    for index in range(count):
        row: dict[str, Any] = {}
        for name in wires:
            value = getattr(message, name)
            if name not in arrays:
                row[name] = value
            elif len(arrays[name]) == 1:
                row[name] = value[index].item()
            else:
                labels = names.get(arrays[name][1], ())
                if len(labels) != value.shape[1]:
                    labels = [str(channel) for channel in range(value.shape[1])]
                row[name] = dict(zip(labels, value[index].tolist(), strict=True))
        yield row


def whole(message: Message, names: Names) -> dict[str, Any]:
    """The fields of a message in one map. Arrays become lists, or maps if their channel names are known."""
    fields: dict[str, Any] = {}
    for name, wire in wire_fields(type(message)).items():
        value = getattr(message, name)
        if wire.kind == "array":
            labels = names.get(wire.shape[-1], ())
            value = _labelled(value.tolist(), labels) if len(labels) == value.shape[-1] else value.tolist()
        fields[name] = value
    return fields


def _labelled(values: list[Any], labels: Sequence[str]) -> Any:
    if values and isinstance(values[0], list):
        return [_labelled(row, labels) for row in values]
    return dict(zip(labels, values, strict=True))
