"""Computes where the links of a walking robot are, from its observation, so that viewers can draw it.

A simulator or driver sends nothing more for this: the observation holds the height and attitude of the torso and all
joint angles. ``links.json`` holds the links of the robots in PyBullet; it is written by
``python -m td3_robot_sims.backends.bullet.links``. A real robot is drawn if its specification has the name and the
channels of one of these robots.

Frames follow REP 103: x ahead, y to the left, z up, in m.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from td3_robot.specs import Float32, Float64, RobotSpec

LINKS = Path(__file__).with_name("links.json")
_SPEED = 0.3  # s/m; the velocity of the torso is observed times this
_TORSO = {name: f"torso.{name}" for name in ("height", "roll", "pitch", "velocity_x", "velocity_y")} | {
    "sin": "target.sin",
    "cos": "target.cos",
}

Vector = tuple[float, float, float]


class Shape(msgspec.Struct, frozen=True):
    """A capsule in the frame of its link: all points within a radius (m) of a line. A sphere begins where it ends."""

    begin: Vector
    end: Vector
    radius: float


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """A link that a joint turns. While its joint is at 0, it is parallel to its parent.

    Attributes:
        name: name of its joint, or ``torso``.
        parent: index of its parent in the robot's links; -1 for the torso.
        origin: place of its joint in the frame of its parent, in m. It is the origin of the link's own frame.
        axis: direction of the joint's axis, a unit vector.
        low: joint angle in rad at which the observation is -1.
        high: joint angle in rad at which the observation is 1.
    """

    name: str
    parent: int
    origin: Vector = (0.0, 0.0, 0.0)
    axis: Vector = (0.0, 0.0, 0.0)
    low: float = 0.0
    high: float = 0.0
    shapes: tuple[Shape, ...] = ()


class Robot(msgspec.Struct, frozen=True):
    """The links of a robot. The first is the torso.

    Attributes:
        height: height of the torso in m when the observed height is 0.
    """

    height: float
    links: tuple[Link, ...]


class Pose(NamedTuple):
    """Where the links of a robot are in the world.

    Attributes:
        positions: origin of each link, float64[L, 3], in m.
        rotations: matrix of each link, float64[L, 3, 3]; it turns vectors of the link into vectors of the world.
    """

    positions: Float64
    rotations: Float64


@cache
def robots() -> dict[str, Robot]:
    """Return the known robots by the names of their specifications."""
    return msgspec.json.decode(LINKS.read_bytes(), type=dict[str, Robot])


class Poses:
    """Computes the pose of one robot, step by step.

    Height, attitude and joints follow from one observation. The place on the floor does not: it is the sum of the
    observed velocities since the beginning of the episode. The heading is right while the target is far ahead, as in
    PyBullet.

    Args:
        spec: a specification for which :func:`known` is true.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self.robot = robots()[spec.name]
        index = {channel.name: place for place, channel in enumerate(spec.observations)}
        self._torso = {name: index[channel] for name, channel in _TORSO.items()}
        self._joints = [index[f"{link.name}.position"] for link in self.robot.links[1:]]
        self._period = spec.control_period
        self._place = np.zeros(2)

    def step(self, observation: Float32, first: bool) -> Pose:
        """Return the pose after a step.

        Args:
            observation: observation of the robot, float32[O], in the units of its specification.
            first: whether this is the first observation of an episode.
        """
        torso = {name: float(observation[place]) for name, place in self._torso.items()}
        yaw = -math.atan2(torso["sin"], torso["cos"])
        if first:
            self._place = np.zeros(2)
        else:
            cos, sin = math.cos(yaw), math.sin(yaw)
            ahead, left = torso["velocity_x"] / _SPEED, torso["velocity_y"] / _SPEED
            self._place += self._period * np.array([cos * ahead - sin * left, sin * ahead + cos * left])
        links = self.robot.links
        positions, rotations = np.zeros((len(links), 3)), np.zeros((len(links), 3, 3))
        positions[0] = *self._place, self.robot.height + torso["height"]
        rotations[0] = (
            _turn((0.0, 0.0, 1.0), yaw) @ _turn((0.0, 1.0, 0.0), torso["pitch"]) @ _turn((1.0, 0.0, 0.0), torso["roll"])
        )
        for index, (link, channel) in enumerate(zip(links[1:], self._joints, strict=True), 1):
            angle = link.low + (float(observation[channel]) + 1) / 2 * (link.high - link.low)
            parent = rotations[link.parent]
            positions[index] = positions[link.parent] + parent @ np.array(link.origin)
            rotations[index] = parent @ _turn(link.axis, angle)
        return Pose(positions, rotations)


def known(spec: RobotSpec) -> bool:
    """Return whether the links of this robot are known and its observation has the channels that place them."""
    robot = robots().get(spec.name)
    if robot is None:
        return False
    needed = {*_TORSO.values(), *(f"{link.name}.position" for link in robot.links[1:])}
    return needed <= {channel.name for channel in spec.observations}


def _turn(axis: Vector, angle: float) -> Float64:
    """Return the matrix that turns by an angle in rad about a unit vector (Rodrigues' formula)."""
    x, y, z = axis
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    turned: Float64 = np.eye(3) + math.sin(angle) * cross + (1.0 - math.cos(angle)) * (cross @ cross)
    return turned
