"""Finds the joints of a robot by the names and units of its channels.

The conversions to ROS 2 and to Foxglove use this module. ``docs/how-to/view_recordings.md`` lists the names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from td3_robot.specs import Channel, Float32, Float64, RobotSpec

_FIELDS = {
    **dict.fromkeys(("position", "pos", "angle"), "position"),
    **dict.fromkeys(("velocity", "vel", "speed"), "velocity"),
    **dict.fromkeys(("effort", "torque", "force"), "effort"),
}
"""Maps the last word of a channel's name to a field of a joint."""
_UNITS = {
    **dict.fromkeys(("rad", "deg", "°", "m"), "position"),
    **dict.fromkeys(("rad/s", "deg/s", "°/s", "m/s"), "velocity"),
    **dict.fromkeys(("N·m", "N*m", "Nm", "N"), "effort"),
}
"""Maps the unit of a channel to a field of a joint."""

Place = tuple[str, str]
"""A joint and one of its fields. If a robot has only one joint, the name of this joint may be empty."""


class Joints:
    """The joints of a robot, found by the names and units of its channels.

    Attributes:
        measured: names of the joints in joint_states; empty if no channel is a joint's position or velocity.
        driven: names of the joints that actions drive.
        unmapped: names of the channels that belong to no joint, and of the channels that repeat the joint and field of
            an earlier channel.
    """

    def __init__(self, spec: RobotSpec) -> None:
        places = [_driven_place(channel) for channel in spec.actions]
        self._applied = _indices(places, spec.name)
        driven = {place[0] for place in places if place}
        if len(spec.actions) == 1:
            driven.add("")  # observations without a joint's name, such as ``angle``, belong to the only joint
        observed = _indices([_measured_place(channel, driven) for channel in spec.observations], spec.name)
        position, velocity, self._effort_observed = observed["position"], observed["velocity"], bool(observed["effort"])
        effort = (observed if self._effort_observed else self._applied)["effort"]
        self._state_fields = {"position": position, "velocity": velocity, "effort": effort}
        self.measured = list(dict.fromkeys([*position, *velocity, *effort])) if position or velocity else []
        self.driven = list(dict.fromkeys(joint for joints in self._applied.values() for joint in joints))
        self.unmapped = [
            channel.name
            for channels, fields in ((spec.observations, observed), (spec.actions, self._applied))
            for index, channel in enumerate(channels)
            if not any(index in joints.values() for joints in fields.values())
        ]

    def state(self, observation: Float32, action: Float32) -> Iterator[Float64]:
        """Yield the positions, velocities and efforts of the joints in ``measured``.

        Args:
            observation: observation of one robot, shape (O,), in the units of its channels.
            action: the applied action of this robot, shape (A,). It gives the efforts if no channel measures them.
        """
        rows = observation, observation, observation if self._effort_observed else action
        return _values(self.measured, self._state_fields, rows)

    def command(self, action: Float32) -> Iterator[Float64]:
        """Yield the positions, velocities and efforts that an action, shape (A,), sets for the joints in ``driven``."""
        return _values(self.driven, self._applied, (action, action, action))


def _values(
    names: Sequence[str], fields: Mapping[str, Mapping[str, int]], rows: Sequence[Float32]
) -> Iterator[Float64]:
    """Yield the values of each field. A joint without a value gets NaN; a field without values is empty.

    ``fields`` and ``rows`` have three items each: for position, velocity and effort. An item of ``fields`` maps a joint
    to the index of the joint's value in the matching item of ``rows``.
    """
    for joints, row in zip(fields.values(), rows, strict=True):
        yield np.array([row[joints[name]] if name in joints else math.nan for name in names if joints], np.float64)


def _driven_place(channel: Channel) -> Place | None:
    """Return the joint that an action channel drives, and the field of the command; None if it drives no joint.

    ``hip.torque`` and ``hip_torque`` drive ``hip``. If the last word names no field, the unit of the channel decides.
    """
    joint, _, word = channel.name.replace("_", ".").rpartition(".")
    if word in _FIELDS:
        return channel.name[: len(joint)], _FIELDS[word]
    return (channel.name, _UNITS[channel.unit]) if channel.unit in _UNITS else None


def _measured_place(channel: Channel, driven: Collection[str]) -> Place | None:
    """Return the joint and field of an observation channel; None if it belongs to no joint.

    If a name ends with a dot and a word for position or velocity, the name always belongs to a joint. For example,
    ``hip.position`` and ``hip.speed`` belong to ``hip``. Other names belong to a joint only if an action drives this
    joint, because a robot also measures heights, forces on its feet and angles of its body.
    """
    joint, _, word = channel.name.rpartition(".")
    if joint and _FIELDS.get(word) in ("position", "velocity"):
        return joint, _FIELDS[word]
    place = _driven_place(channel)
    return place if place and place[0] in driven else None


def _indices(places: Iterable[Place | None], robot: str) -> dict[str, dict[str, int]]:
    """For each field, return the channel index of each joint. A joint without a name gets the name of the robot."""
    result: dict[str, dict[str, int]] = {"position": {}, "velocity": {}, "effort": {}}
    for index, place in enumerate(places):
        if place:
            result[place[1]].setdefault(place[0] or robot, index)
    return result
