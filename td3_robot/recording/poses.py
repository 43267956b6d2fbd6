"""Computes the places of a robot's links (rigid parts) from its observation, so that viewers can draw the robot.

The observation holds all joint angles and, for a walking robot, the height and attitude of its torso. ``links.json``
holds the links of the walking robots in PyBullet. ``python -m tests.recording.links`` writes this file.
:func:`read_links` adds other robots.

Frames follow REP 103: x ahead, y to the left, z up, in m.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import UsageError
from td3_robot.specs import Float32, Float64, RobotSpec
from td3_robot.util import files

LINKS = Path(__file__).with_name("links.json")
_LONGEST = 1 << 24  # bytes of a file
_ROUNDED = 1e-3  # allowed error of the length of a unit vector
_SPEED = 0.3  # s/m; the observed velocity of the torso is its velocity in m/s times this factor
_TORSO = {name: f"torso.{name}" for name in ("height", "roll", "pitch", "velocity_x", "velocity_y")}
_TORSO |= {"sin": "target.sin", "cos": "target.cos"}

Vector = tuple[float, float, float]


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A capsule in the frame of its link: all points within a radius (m) of a line. A line of length 0 is a sphere."""

    begin: Vector
    end: Vector
    radius: float


class Link(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A link that a joint turns. If the joint angle is 0, the link's frame is parallel to its parent's frame.

    Attributes:
        name: name of its joint; any name for the first link. The channel ``NAME.position`` observes the joint's angle.
        parent: index of its parent in the robot's links; -1 for the first link.
        origin: place of its joint in the frame of its parent, in m. This place is the origin of the link's frame.
        axis: direction of the joint's axis, a unit vector.
        low: joint angle in rad at which the observation is -1.
        high: joint angle in rad at which the observation is 1. With the defaults of ``low`` and ``high``, the
            observation is the joint angle in rad.
    """

    name: str
    parent: int
    origin: Vector = (0.0, 0.0, 0.0)
    axis: Vector = (0.0, 0.0, 0.0)
    low: float = -1.0
    high: float = 1.0
    shapes: tuple[Shape, ...] = ()


class Robot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links of a robot. The first link is the torso, or the fixed base of an arm. A parent precedes its children.

    Attributes:
        height: height of the torso in m when the observed height is 0, or height of the fixed base.
    """

    height: float
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if not self.links or self.links[0].parent != -1:
            raise ValueError("the parent of the first link must be -1")
        for index, link in enumerate(self.links[1:], 1):
            if not 0 <= link.parent < index:
                raise ValueError(f"link {link.name!r} has parent {link.parent}; allowed: 0 to {index - 1}")
            if abs(math.hypot(*link.axis) - 1.0) > _ROUNDED:
                raise ValueError(f"link {link.name!r} has axis {list(link.axis)}; allowed: vectors of length 1")
        if not any(link.shapes for link in self.links):
            raise ValueError("no link has a shape")


class Pose(NamedTuple):
    """Where the L links of a robot are in the world, for T steps.

    Attributes:
        positions: origin of each link, float64[T, L, 3], in m.
        rotations: rotation matrix of each link, float64[T, L, 3, 3]. It converts vectors from the frame of the link
            to the frame of the world.
    """

    positions: Float64
    rotations: Float64


@cache
def robots() -> dict[str, Robot]:
    """Return the known robots by the names of their specifications."""
    return msgspec.json.decode(LINKS.read_bytes(), type=dict[str, Robot])


def read_links(path: str) -> None:
    """Add the robots in a file like ``links.json``. Raises a UsageError if the file is missing or malformed."""
    try:
        robots().update(msgspec.json.decode(files.read(Path(path), _LONGEST), type=dict[str, Robot]))
    except OSError as error:
        raise UsageError(f"--links {path!r} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"--links {path!r}: {error}") from None


class Poses:
    """Computes the pose of one robot, step by step.

    Height, attitude and joints follow from one observation. The place on the floor is the integral of the
    observed velocities since the beginning of the episode. The heading comes from the observed direction to the
    target. The direction to a near target also changes when the robot walks without turning, so the heading is correct
    only if the target is far away, as in PyBullet. A robot whose observation lacks one of the channels in _TORSO has a
    fixed base.

    Args:
        spec: a specification for which :func:`known` is true.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self.robot = robots()[spec.name]
        index = {channel.name: place for place, channel in enumerate(spec.observations)}
        self._torso = {name: index[channel] for name, channel in _TORSO.items() if channel in index}
        self._fixed = len(self._torso) < len(_TORSO)
        self._joints = [index[f"{link.name}.position"] for link in self.robot.links[1:]]
        self._period = spec.control_period
        self._place = np.zeros(2)

    def walk(self, observations: Float32, first: NDArray[np.bool_]) -> Float64:
        """Return the place on the floor after each of T successive steps, float64[T, 2], in m.

        Args:
            observations: observations of the robot, float32[T, O], with O channels in the units of its specification.
            first: whether a step is the first of its episode, bool[T]. An episode begins at (0, 0).
        """
        if self._fixed:
            return np.zeros((len(observations), 2))
        yaw = self._yaw(observations)
        ahead, left = (observations[:, self._torso[name]] / _SPEED for name in ("velocity_x", "velocity_y"))
        velocity = np.stack([np.cos(yaw) * ahead - np.sin(yaw) * left, np.sin(yaw) * ahead + np.cos(yaw) * left], 1)
        places = np.empty((len(observations), 2))
        for step, begins in enumerate(first.tolist()):
            self._place = np.zeros(2) if begins else self._place + self._period * velocity[step]
            places[step] = self._place
        return places

    def pose(self, observations: Float32, places: Float64) -> Pose:
        """Return the pose at T steps.

        Args:
            observations: the observation at each step, float32[T, O].
            places: the place on the floor at each step, float64[T, 2].
        """
        links, steps = self.robot.links, len(observations)
        positions, rotations = np.zeros((steps, len(links), 3)), np.zeros((steps, len(links), 3, 3))
        positions[:, 0, :2], positions[:, 0, 2], rotations[:, 0] = places, self.robot.height, np.eye(3)
        if not self._fixed:
            positions[:, 0, 2] += observations[:, self._torso["height"]]
            pitch, roll = (observations[:, self._torso[name]] for name in ("pitch", "roll"))
            yawed = _turns((0.0, 0.0, 1.0), self._yaw(observations))
            rotations[:, 0] = yawed @ _turns((0.0, 1.0, 0.0), pitch) @ _turns((1.0, 0.0, 0.0), roll)
        for index, (link, channel) in enumerate(zip(links[1:], self._joints, strict=True), 1):
            angles = link.low + (observations[:, channel] + 1.0) / 2 * (link.high - link.low)
            parent = rotations[:, link.parent]
            positions[:, index] = positions[:, link.parent] + parent @ np.array(link.origin)
            rotations[:, index] = parent @ _turns(link.axis, angles)
        return Pose(positions, rotations)

    def step(self, observation: Float32, first: bool) -> Pose:
        """Return the pose after one step. In the result, T is 1. The observation is float32[O]."""
        observations = observation[None]
        return self.pose(observations, self.walk(observations, np.array([first])))

    def _yaw(self, observations: Float32) -> Float64:
        sin, cos = (observations[:, self._torso[name]].astype(np.float64) for name in ("sin", "cos"))
        yaw: Float64 = -np.arctan2(sin, cos)
        return yaw


def ends(robot: Robot, pose: Pose) -> Float64:
    """Return begin and end of the S shapes of a robot, float64[T, S, 2, 3], in m, in the order of :func:`radii`."""
    places = [
        pose.positions[:, index, None] + np.array([shape.begin, shape.end]) @ pose.rotations[:, index].swapaxes(-1, -2)
        for index, link in enumerate(robot.links)
        for shape in link.shapes
    ]
    return np.stack(places, axis=1)


def radii(robot: Robot) -> list[float]:
    """Return the radius of each shape of a robot, in m."""
    return [shape.radius for link in robot.links for shape in link.shapes]


def known(spec: RobotSpec) -> bool:
    """Return whether the links of this robot are known, and its observation has the angles of all joints."""
    robot, observed = robots().get(spec.name), {channel.name for channel in spec.observations}
    return robot is not None and all(f"{link.name}.position" in observed for link in robot.links[1:])


def _turns(axis: Vector, angles: Float64 | Float32) -> Float64:
    """Return a rotation matrix about a unit vector for each of T angles in rad (Rodrigues' formula)."""
    x, y, z = axis
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    wide = angles.astype(np.float64)[:, None, None]
    turned: Float64 = np.eye(3) + np.sin(wide) * cross + (1.0 - np.cos(wide)) * (cross @ cross)
    return turned
