"""A robot on a floor in a PyBullet world of its own.

Every world is a private physics client, so that many live in one process without disturbing one another. A PyBullet
call costs microseconds however little it returns: a step makes one each for torques, stepping, links, joints, contacts.

The world is that of ``pybullet_envs_gymnasium`` 0.6.0: the same models, loaded in the same order, with the same
parameters. Bullet's results depend on all of these to the last bit.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sims.quiet import without_lines
from sims.robots import CONTROL_PERIOD, RobotModel
from td3_robot.errors import ConfigError

with without_lines(b"pybullet build time:"):
    import pybullet
    import pybullet_data

SUBSTEPS = 4
SOLVER_ITERATIONS = 5
GRAVITY = 9.8  # m/s²
FLOOR_FRICTION = 0.8
_HEIGHT, _PITCH = 1, 2  # joints of a planar robot's chain
BASE = -1  # PyBullet's index of a body's root link
ANY_LINK = -2
TORSO = "torso"

_CAMERA = {"distance": 3.0, "yaw": 0.0, "pitch": -30.0}  # m and degrees: from the robot's right, and above
_windows: set[int] = set()  # clients that show one: PyBullet, asked for a second, gives the first again

_DATA = Path(pybullet_data.getDataPath())
_LOAD_FLAGS = (
    pybullet.URDF_USE_SELF_COLLISION
    | pybullet.URDF_USE_SELF_COLLISION_EXCLUDE_ALL_PARENTS
    | pybullet.URDF_GOOGLEY_UNDEFINED_COLORS
)


class Body(NamedTuple):
    """Where the robot is.

    ``x`` and ``y`` are the mean over its parts, ``z`` is the torso's height (m); ``roll``, ``pitch``, ``yaw`` (rad) and
    ``velocity`` (x, y, z in m/s) are the torso's.
    """

    x: float
    y: float
    z: float
    roll: float
    pitch: float
    yaw: float
    velocity: tuple[float, float, float]


def _mean(values: list[float]) -> float:
    """The mean of 8 to 128 numbers as numpy computes it, to the last bit, in half the time."""
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


def _disconnect(client: int) -> None:
    _windows.discard(client)
    pybullet.disconnect(client)


class World:
    """One robot, one floor, one physics client.

    Attributes:
        joint_ranges: (lower limit, width of the range) of each driven joint, in rad.

    Raises:
        ConfigError: ``show`` is asked for and there is no display, or a window already.
    """

    def __init__(self, model: RobotModel, show: bool = False) -> None:
        if show and sys.platform == "linux" and not os.environ.get("DISPLAY"):
            raise ConfigError("render mode 'human' needs a display, and DISPLAY is not set; 'rgb_array' needs none")
        if show and _windows:
            raise ConfigError("render mode 'human': PyBullet shows one window in a process, and one is open already")
        self.client: int = pybullet.connect(pybullet.GUI if show else pybullet.DIRECT)
        if self.client < 0:
            raise RuntimeError("PyBullet gave no physics client; it allows 1024 in one process")
        self._end = weakref.finalize(self, _disconnect, self.client)
        if show:
            _windows.add(self.client)
            # Without its side panels, and without drawing the pictures in them, the window is all robot.
            pybullet.configureDebugVisualizer(pybullet.COV_ENABLE_GUI, 0, physicsClientId=self.client)
        self._floor = self._build_floor()
        (self._robot,) = pybullet.loadMJCF(
            str(_DATA / "mjcf" / model.mjcf), flags=_LOAD_FLAGS, physicsClientId=self.client
        )
        self._index_robot(model)
        self._start = pybullet.saveState(physicsClientId=self.client)

    def _build_floor(self) -> int:
        client = self.client
        pybullet.setPhysicsEngineParameter(deterministicOverlappingPairs=1, physicsClientId=client)
        pybullet.setGravity(0, 0, -GRAVITY, physicsClientId=client)
        pybullet.setDefaultContactERP(0.9, physicsClientId=client)
        pybullet.setPhysicsEngineParameter(
            fixedTimeStep=CONTROL_PERIOD,
            numSolverIterations=SOLVER_ITERATIONS,
            numSubSteps=SUBSTEPS,
            physicsClientId=client,
        )
        (floor,) = pybullet.loadSDF(str(_DATA / "plane_stadium.sdf"), physicsClientId=client)
        pybullet.changeDynamics(floor, BASE, lateralFriction=FLOOR_FRICTION, restitution=0.5, physicsClientId=client)
        return int(floor)

    def _index_robot(self, model: RobotModel) -> None:
        """Find the model's joints and links, and let every joint swing freely."""
        parts: dict[str, int] = {}
        joints: dict[str, int] = {}
        ranges: dict[str, tuple[float, float]] = {}
        for index in range(pybullet.getNumJoints(self._robot, physicsClientId=self.client)):
            info = pybullet.getJointInfo(self._robot, index, physicsClientId=self.client)
            joint, part = info[1].decode(), info[12].decode()
            # A loaded joint is braked by a motor; without force it swings, and takes torques.
            pybullet.setJointMotorControl2(
                self._robot, index, pybullet.POSITION_CONTROL, force=0, physicsClientId=self.client
            )
            parts[part] = index
            if index == 0:
                # The root link stands for a torso that is none of the links after it. Its place among the parts
                # matters: their mean is rounded in this order.
                parts.setdefault(TORSO, BASE)
            if not joint.startswith(("ignore", "jointfix")):
                joints[joint] = index
                ranges[joint] = (info[8], info[9] - info[8])
        expected = [joint for joint, _ in model.joints]
        if list(joints) != expected:
            raise RuntimeError(f"the installed {model.mjcf} has joints {list(joints)}; {model.name} needs {expected}")
        self.joint_ranges = list(ranges.values())
        self._joints = list(joints.values())
        self._feet = [parts[foot] for foot in model.feet]
        self._links = [index for index in parts.values() if index != BASE]
        self._torso = parts[TORSO]
        self._torso_place = list(parts).index(TORSO)
        self._still = [[0.0]] * len(self._joints)
        # A planar robot hangs on a chain of its own from the world: along x, along z, about y.
        self._planar = self._torso != BASE
        self._loaded: list[tuple[int, float, Sequence[float]]] = []  # part, its mass (kg) and inertia (kg·m²), at need

    def vary(self, mass: float | None, friction: float | None, damping: float | None) -> None:
        """Change the robot and the floor, before a reset: contacts that exist keep the friction they were made with.

        Args:
            mass: factor of the loaded mass and inertia of every part.
            friction: factor of the floor's lateral friction.
            damping: of every driven joint, in N·m·s/rad.

        None leaves what is there.
        """
        if mass is not None:
            self._scale_masses(mass)
        if friction is not None:
            self._set(self._floor, BASE, lateralFriction=FLOOR_FRICTION * friction)
        if damping is not None:
            for joint in self._joints:
                self._set(self._robot, joint, jointDamping=damping)

    def _set(self, body: int, link: int, **values: Any) -> None:
        pybullet.changeDynamics(body, link, physicsClientId=self.client, **values)

    def _scale_masses(self, factor: float) -> None:
        client, robot = self.client, self._robot
        if not self._loaded:
            indices = range(BASE, pybullet.getNumJoints(robot, physicsClientId=client))
            infos = [(index, *pybullet.getDynamicsInfo(robot, index, physicsClientId=client)[:3]) for index in indices]
            self._loaded = [(index, weight, inertia) for index, weight, _, inertia in infos if weight > 0]
        for index, weight, inertia in self._loaded:
            # Given a mass alone, Bullet would compute the inertia anew from the shape.
            self._set(robot, index, mass=weight * factor, localInertiaDiagonal=[value * factor for value in inertia])

    def tilt(self, angle: float, side: float) -> None:
        """Lean the robot over, after a reset: by ``angle`` rad to ``side`` rad (0 ahead, π/2 left), lifted clear.

        A planar robot leans ahead or back, whichever is nearer.
        """
        client, robot = self.client, self._robot
        before = self._lowest()
        if self._planar:
            ahead = math.copysign(angle, math.cos(side))
            pybullet.resetJointState(robot, _PITCH, ahead, 0.0, physicsClientId=client)
        else:
            position, upright = pybullet.getBasePositionAndOrientation(robot, client)
            lean = pybullet.getQuaternionFromAxisAngle([-math.sin(side), math.cos(side), 0.0], angle)
            _, turned = pybullet.multiplyTransforms([0, 0, 0], lean, [0, 0, 0], upright)
            pybullet.resetBasePositionAndOrientation(robot, position, turned, physicsClientId=client)
        lift = before - self._lowest()
        if lift <= 0:
            return
        if self._planar:
            height = pybullet.getJointState(robot, _HEIGHT, client)[0]
            pybullet.resetJointState(robot, _HEIGHT, height + lift, 0.0, physicsClientId=client)
        else:
            (x, y, z), turned = pybullet.getBasePositionAndOrientation(robot, client)
            pybullet.resetBasePositionAndOrientation(robot, (x, y, z + lift), turned, physicsClientId=client)

    def _lowest(self) -> float:
        """Height in m of the lowest point of the boxes around the robot's parts."""
        return min(
            float(pybullet.getAABB(self._robot, index, physicsClientId=self.client)[0][2])
            for index in range(BASE + self._planar, pybullet.getNumJoints(self._robot, physicsClientId=self.client))
        )

    def push(self, force: float, side: float) -> None:
        """Add ``force`` N on the torso's centre of mass to the next control period, towards ``side`` rad of the world.

        A planar robot is pushed ahead or back, whichever is nearer.
        """
        client, robot, torso = self.client, self._robot, self._torso
        position = self._torso_position()
        x, y = force * math.cos(side), force * math.sin(side)
        if self._planar:
            x, y = math.copysign(force, x), 0.0
        pybullet.applyExternalForce(robot, torso, [x, y, 0.0], position, pybullet.WORLD_FRAME, physicsClientId=client)

    def reset(self, positions: Sequence[float]) -> None:
        """Return to the state after loading, with these positions (rad, one per driven joint) and no velocity."""
        pybullet.restoreState(self._start, physicsClientId=self.client)
        pybullet.resetJointStatesMultiDof(
            self._robot,
            self._joints,
            [[position] for position in positions],
            targetVelocities=self._still,
            physicsClientId=self.client,
        )

    # In the calls of a step, PyBullet's arguments go by position where they can: looking up names costs time too.

    def advance(self, torques: list[float]) -> None:
        """Hold these torques (N·m, one per driven joint) for one control period."""
        pybullet.setJointMotorControlArray(
            self._robot, self._joints, pybullet.TORQUE_CONTROL, forces=torques, physicsClientId=self.client
        )
        pybullet.stepSimulation(self.client)

    def joints(self) -> Sequence[tuple[float, float, Any, float]]:
        """Of each driven joint: position in rad, velocity in rad/s, and two values that a torque-driven joint lacks."""
        states: Sequence[tuple[float, float, Any, float]] = pybullet.getJointStates(
            self._robot, self._joints, self.client
        )
        return states

    def body(self) -> Body:
        """Where the robot is now."""
        client, robot, torso = self.client, self._robot, self._torso
        links = pybullet.getLinkStates(robot, self._links, 0, 0, client)
        xs = [link[0][0] for link in links]
        ys = [link[0][1] for link in links]
        if torso == BASE:
            position, orientation = pybullet.getBasePositionAndOrientation(robot, client)
            velocity, _ = pybullet.getBaseVelocity(robot, client)
            xs.insert(self._torso_place, position[0])
            ys.insert(self._torso_place, position[1])
        else:
            position, orientation, _, _, _, _, velocity, _ = pybullet.getLinkState(robot, torso, 1, 0, client)
        # The floor counts as a part at the origin: so it does in the published robots.
        xs.append(0.0)
        ys.append(0.0)
        roll, pitch, yaw = pybullet.getEulerFromQuaternion(orientation)
        return Body(_mean(xs), _mean(ys), position[2], roll, pitch, yaw, velocity)

    def feet_on_floor(self) -> list[float]:
        """1.0 for each foot that touched the floor in the last substep, else 0.0."""
        contacts = pybullet.getContactPoints(self._robot, self._floor, ANY_LINK, ANY_LINK, self.client)
        touching = {contact[3] for contact in contacts}
        return [1.0 if foot in touching else 0.0 for foot in self._feet]

    def render(self, width: int, height: int) -> NDArray[np.uint8]:
        """The robot from its right, the camera following its torso: uint8[height, width, 3]."""
        view = pybullet.computeViewMatrixFromYawPitchRoll(
            cameraTargetPosition=self._torso_position(), roll=0.0, upAxisIndex=2, **_CAMERA
        )
        lens = pybullet.computeProjectionMatrixFOV(fov=60.0, aspect=width / height, nearVal=0.1, farVal=100.0)
        pixels = pybullet.getCameraImage(
            width, height, view, lens, renderer=pybullet.ER_TINY_RENDERER, physicsClientId=self.client
        )[2]
        return np.asarray(pixels, np.uint8).reshape(height, width, 4)[:, :, :3].copy()

    def follow(self) -> None:
        """Turn the window's camera to the torso; call it after each step of a world that is shown."""
        pybullet.resetDebugVisualizerCamera(
            cameraDistance=_CAMERA["distance"],
            cameraYaw=_CAMERA["yaw"],
            cameraPitch=_CAMERA["pitch"],
            cameraTargetPosition=self._torso_position(),
            physicsClientId=self.client,
        )

    def _torso_position(self) -> tuple[float, float, float]:
        """Where the torso's centre of mass is, in m."""
        if self._torso == BASE:
            position = pybullet.getBasePositionAndOrientation(self._robot, self.client)[0]
        else:
            position = pybullet.getLinkState(self._robot, self._torso, physicsClientId=self.client)[0]
        x, y, z = position
        return x, y, z

    def close(self) -> None:
        """End the physics client; a second call does nothing."""
        self._end()
