"""One robot on a floor in one PyBullet world.

Models, the order of loading and all parameters equal those of ``pybullet_envs_gymnasium`` 0.6.0, because Bullet's
results depend on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pybullet_data
from numpy.typing import NDArray

from td3_robot.errors import ConfigError
from td3_robot.util.text import did_you_mean, one_line
from td3_robot_sims.backends.bullet import floor
from td3_robot_sims.backends.bullet.c_api import pybullet
from td3_robot_sims.backends.bullet.client import BASE, Client, Joint, Part
from td3_robot_sims.backends.bullet.robots import CONTROL_PERIOD, RobotModel
from td3_robot_sims.quiet import caught_stdout

SUBSTEPS = 4
SOLVER_ITERATIONS = 5
GRAVITY = 9.8  # m/s²
CONTACT_ERP = 0.9
FLOOR_FRICTION = 0.8
_PLANAR_JOINTS = 3  # the first joints of a planar robot connect it to the world: along x, along z and about y
_HEIGHT, _PITCH = 1, 2  # indices of two of these joints
_IGNORED = "ignore"  # beginning of the names of joints that no motor drives
TORSO = "torso"
_LABEL = re.compile(r"b3(?:Warning|Error)\[[^\]]*\]:")  # PyBullet writes this before each of its messages
_LONGEST_REASON = 500  # characters of PyBullet's messages in an error
# PyBullet loads a robot even if it cannot read a mesh. Its message then contains one of these texts.
_UNREAD_MESH = ("cannot find '", "cannot extract ", "issue extracting mesh ")

_CAMERA = {
    "distance": 3.0,
    "yaw": 0.0,
    "pitch": -30.0,
}  # m and degrees: a robot that faces along x is seen from its right, and from above

_DATA = Path(pybullet_data.getDataPath())
_LOAD_FLAGS = (
    pybullet.URDF_USE_SELF_COLLISION
    | pybullet.URDF_USE_SELF_COLLISION_EXCLUDE_ALL_PARENTS
    | pybullet.URDF_GOOGLEY_UNDEFINED_COLORS
)


class Body(NamedTuple):
    """Pose and velocity of the robot.

    ``x`` and ``y`` are means over all parts, in m. The floor counts as a part at 0, as in
    ``pybullet_envs_gymnasium``. All other values are those of the torso. ``z`` is the height in m. ``roll``, ``pitch``
    and ``yaw`` are in rad. ``velocity`` holds x, y and z in m/s.
    """

    x: float
    y: float
    z: float
    roll: float
    pitch: float
    yaw: float
    velocity: list[float]


def _mean(values: list[float]) -> float:
    """Return the mean, with the same bits as numpy's mean. For 8 to 128 numbers, this takes half of numpy's time."""
    if not 8 <= len(values) <= 128:
        return float(np.mean(values))
    a, b, c, d, e, f, g, h = values[:8]
    whole = len(values) & ~7
    for i in range(8, whole, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for value in values[whole:]:
        total += value
    return total / len(values)


class World:
    """One robot and one floor in one physics client, with a window if ``show`` is set.

    Attributes:
        joint_ranges: lower limit and width of the range of each driven joint, in rad.
    """

    def __init__(self, model: RobotModel, show: bool = False) -> None:
        self.client = Client(show)
        self.client.configure(GRAVITY, CONTROL_PERIOD, SUBSTEPS, SOLVER_ITERATIONS, CONTACT_ERP)
        self._floor = self.client.load(str(_DATA / "plane_stadium.sdf"))
        self.client.change(self._floor, BASE, friction=FLOOR_FRICTION, restitution=0.5)
        self._robot = self._load(model)
        if model.base_height is not None:
            self.client.place(self._robot, (0.0, 0.0, model.base_height), (0.0, 0.0, 0.0, 1.0))
        self._index_robot(model)
        if not show:
            self.client.hide(self._floor)  # render() draws the floor
        self._start = self.client.save()

    def _load(self, model: RobotModel) -> int:
        """Load the model's file, and return the number of its body.

        Raises:
            ConfigError: there is no such file, PyBullet cannot load it, or PyBullet cannot read a mesh of the robot.
        """
        file = os.path.join(_DATA, "mjcf", model.file)
        if not os.path.isfile(file):
            raise ConfigError(f"robot {model.name!r}: there is no file {file!r}; allowed: a file .urdf or .xml")
        body = None
        with caught_stdout() as said, contextlib.suppress(RuntimeError, ValueError):
            body = self.client.load(file, _LOAD_FLAGS)
        messages = [" ".join(message.split()) for message in _LABEL.split("".join(said)) if message.strip()]
        if body is None:
            why = f" ({one_line(' '.join(messages), _LONGEST_REASON)})" if messages else ""
            allowed = "allowed: a file .urdf or .xml (MJCF) with one robot"
            raise ConfigError(f"robot {model.name!r}: PyBullet cannot load {file!r}{why}; {allowed}")
        for message in messages:
            if any(text in message for text in _UNREAD_MESH):
                why = one_line(message, _LONGEST_REASON)
                raise ConfigError(f"robot {model.name!r}: PyBullet cannot read a mesh of {file!r} ({why})")
        return body

    def _index_robot(self, model: RobotModel) -> None:
        """Find the model's joints and links, and let every joint swing freely.

        Raises:
            ConfigError: the joints or feet of the model are not those of the file, the joints are not consecutive, a
                joint has no finite limits, its lower limit is not below its upper limit, or the root link of a robot
                that is not planar has no mass.
        """
        parts: dict[str, int] = {}
        driven: dict[int, Joint] = {}
        joints = self.client.joints(self._robot)
        for index, joint in enumerate(joints):
            self.client.release(self._robot, joint)
            parts[joint.link] = index
            if index == 0:
                # The torso is the second part, as in ``pybullet_envs_gymnasium``: the order of the parts affects the
                # rounding of the mean position. At first, BASE (the root link) is the torso. If a later link has the
                # name "torso", the index of this link replaces BASE. The torso is then still the second part.
                parts.setdefault(TORSO, BASE)
            if joint.velocity_at >= 0 and not joint.name.startswith(_IGNORED):
                driven[index] = joint
        found, expected = [joint.name for joint in driven.values()], [joint for joint, _ in model.joints]
        if found != expected:
            raise ConfigError(
                f"robot {model.name!r}: its RobotModel has the joints {expected}; {model.file!r} has {found}; "
                "both lists must be equal"
            )
        for joint in driven.values():
            if not 0 < joint.upper - joint.lower < math.inf:
                in_mjcf = "" if Path(model.file).suffix == ".urdf" else ' (attribute range, with limited="true")'
                raise ConfigError(
                    f"robot {model.name!r}: joint {joint.name!r} has the limits {joint.lower:g} and {joint.upper:g} in "
                    f"{model.file!r}; each joint needs a lower limit below its upper limit, both finite{in_mjcf}"
                )
        self.joint_ranges = [(joint.lower, joint.upper - joint.lower) for joint in driven.values()]
        self._joints = list(driven)
        first, last = driven[self._joints[0]], driven[self._joints[-1]]
        if last.velocity_at - first.velocity_at + 1 != len(driven):
            raise ConfigError(f"robot {model.name!r}: its joints in {model.file!r} are not consecutive")
        self._angles = slice(first.position_at, last.position_at + 1)
        self._first_speed = first.velocity_at
        self._speeds = slice(first.velocity_at, last.velocity_at + 1)
        for foot in model.feet:
            if foot not in parts:
                choice = did_you_mean(foot, parts, "allowed:")
                raise ConfigError(f"robot {model.name!r}: {model.file!r} has no link {foot!r}; {choice}")
        self._feet = [parts[foot] for foot in model.feet]
        self._torso = parts[TORSO]
        self._torso_place = list(parts).index(TORSO)
        self._link_count = len(joints)
        self._xs, self._ys = (slice(axis, 7 * self._link_count, 7) for axis in (0, 1))
        # The torso of a planar robot is not the root link. But in other robots, a fixed joint can connect the two.
        free = [joint.velocity_at >= 0 and joint.name.startswith(_IGNORED) for joint in joints[:_PLANAR_JOINTS]]
        self._planar = self._torso != BASE and sum(free) == _PLANAR_JOINTS
        self._height_at = joints[_HEIGHT].position_at if self._planar else -1
        if not self._planar and self.client.part(self._robot, BASE).mass <= 0:
            raise ConfigError(
                f"robot {model.name!r}: the root link of {model.file!r} has no mass, so the robot hangs in the air; "
                "allowed: a root link with a mass above 0"
            )

    def vary(self, mass: float | None, friction: float | None, damping: float | None) -> None:
        """Change the robot and the floor. Call this before a reset: a contact keeps the friction that it began with.

        Args:
            mass: factor for the loaded mass and inertia of every part; None for no change.
            friction: factor for the floor's lateral friction; None for no change.
            damping: damping of every driven joint in N·m·s/rad; None for no change.
        """
        if mass is not None:
            for index, part in self._parts.items():
                # Without an inertia, Bullet would compute the inertia from the shape.
                inertia = [value * mass for value in part.inertia]
                self.client.change(self._robot, index, mass=part.mass * mass, inertia=inertia)
        if friction is not None:
            self.client.change(self._floor, BASE, friction=FLOOR_FRICTION * friction)
        if damping is not None:
            for joint in self._joints:
                self.client.change(self._robot, joint, damping=damping)

    @functools.cached_property
    def _parts(self) -> dict[int, Part]:
        """The loaded properties of each link with a mass, by index. The first access must precede the first change."""
        parts = {index: self.client.part(self._robot, index) for index in range(BASE, self._link_count)}
        return {index: part for index, part in parts.items() if part.mass > 0}

    def tilt(self, angle: float, side: float) -> None:
        """Tilt the robot by ``angle`` rad, and lift it if its lowest point would sink. Call this after a reset.

        Args:
            side: direction of the tilt in rad: 0 is ahead, π/2 is left. A planar robot tilts ahead or back, in the
                direction that is nearer to ``side``.
        """
        client, robot = self.client, self._robot
        before = self._lowest()
        if self._planar:
            ahead = math.copysign(angle, math.cos(side))
            client.set_joints(robot, [_PITCH], [ahead])
        else:
            position, upright = self._base()
            lean = pybullet.getQuaternionFromAxisAngle([-math.sin(side), math.cos(side), 0.0], angle)
            _, turned = pybullet.multiplyTransforms([0, 0, 0], lean, [0, 0, 0], upright)
            client.place(robot, position, turned)
        lift = before - self._lowest()
        if lift <= 0:
            return
        if self._planar:
            client.look(robot)
            client.set_joints(robot, [_HEIGHT], [client.positions[self._height_at] + lift])
        else:
            (x, y, z), turned = self._base()
            client.place(robot, (x, y, z + lift), turned)

    def _base(self) -> tuple[list[float], list[float]]:
        """Position (m) and quaternion of the root link."""
        self.client.look(self._robot)
        return self.client.positions[:3], self.client.positions[3:7]

    def _lowest(self) -> float:
        """Height in m of the lowest point of the bounding boxes of the robot's parts."""
        return self.client.lowest(self._robot, range(BASE + self._planar, self._link_count))

    def push(self, force: float, side: float) -> None:
        """Push the torso's centre of mass with ``force`` N during the next control period.

        Args:
            side: direction in world coordinates, rad. A planar robot is pushed ahead or back, in the direction that is
                nearer to ``side``.
        """
        x, y = force * math.cos(side), force * math.sin(side)
        if self._planar:
            x, y = math.copysign(force, x), 0.0
        self.client.push(self._robot, self._torso, (x, y, 0.0), self._torso_position())

    def reset(self, positions: Sequence[float], tilt: float = 0.0, side: float = 0.0) -> None:
        """Return to the state after loading, and forget the contacts of earlier episodes.

        Bullet keeps contact points and their order when it restores a state. If the world kept them, an episode would
        depend on the earlier ones, and a restored robot would differ from the saved one.

        Args:
            positions: positions of the driven joints, rad. The joints are at rest.
            tilt: angle of the robot's tilt, rad.
            side: direction of the tilt, see :meth:`tilt`.
        """
        self.client.restore(self._start)
        self.client.set_joints(self._robot, self._joints, positions)
        if tilt:
            self.tilt(tilt, side)
        self.client.forget_contacts(self._robot)

    def advance(self, torques: list[float]) -> None:
        """Simulate one control period with ``torques`` (N·m) at the driven joints."""
        self.client.drive(self._robot, self._first_speed, torques)
        self.client.step()

    def joints(self) -> tuple[list[float], list[float]]:
        """Positions (rad) and velocities (rad/s) of the driven joints."""
        client = self.client
        client.look(self._robot, self._torso != BASE)
        return client.positions[self._angles], client.velocities[self._speeds]

    def body(self) -> Body:
        """The current pose and velocity of the robot."""
        client, torso = self.client, self._torso
        client.look(self._robot, self._torso != BASE)
        xs, ys = client.links[self._xs], client.links[self._ys]
        if torso == BASE:
            x, y, z, *orientation = client.positions[:7]
            velocity = client.velocities[:3]
        else:
            x, y, z, *orientation = client.links[7 * torso : 7 * torso + 7]
            velocity = client.link_velocities[6 * torso : 6 * torso + 3]
            del xs[torso], ys[torso]
        xs.insert(self._torso_place, x)
        ys.insert(self._torso_place, y)
        # Add the floor as a part at the origin, as ``pybullet_envs_gymnasium`` does.
        xs.append(0.0)
        ys.append(0.0)
        roll, pitch, yaw = pybullet.getEulerFromQuaternion(orientation)
        return Body(_mean(xs), _mean(ys), z, roll, pitch, yaw, velocity)

    def feet_on_floor(self) -> list[float]:
        """1.0 for each foot that touched the floor in the last substep, else 0.0."""
        touching = self.client.touching(self._robot, self._floor)
        return [1.0 if foot in touching else 0.0 for foot in self._feet]

    def render(self, width: int, height: int) -> NDArray[np.uint8]:
        """A picture with the torso in its centre: uint8[height, width, 3]. The camera looks along +y, from above."""
        view = pybullet.computeViewMatrixFromYawPitchRoll(
            cameraTargetPosition=self._torso_position(), roll=0.0, upAxisIndex=2, **_CAMERA
        )
        lens = pybullet.computeProjectionMatrixFOV(fov=60.0, aspect=width / height, nearVal=0.1, farVal=100.0)
        picture, shows_robot = self.client.picture(width, height, view, lens)
        return np.where(shows_robot[:, :, None], picture, floor.draw(width, height, view, lens))

    def follow(self) -> None:
        """Point the window's camera at the torso; call it after each step of a world with a window."""
        self.client.aim(**_CAMERA, target=self._torso_position())

    def _torso_position(self) -> list[float]:
        """Position of the torso's centre of mass, m."""
        if self._torso == BASE:
            return self._base()[0]
        self.client.look(self._robot)
        return self.client.links[7 * self._torso : 7 * self._torso + 3]

    def close(self) -> None:
        """Free the physics client; a second call does nothing."""
        self.client.close()
