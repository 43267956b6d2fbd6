"""PyBullet's physics worlds, used through Bullet's C interface for speed.

PyBullet's Python functions hold the interpreter lock while they simulate, and none of them returns the whole state of a
body. With the C interface, a step releases the lock, and one request returns the state of the base, all links and all
joints. The commands have the same effect as PyBullet's functions, so the results are the same bit for bit.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_float, c_int, sizeof
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import ConfigError
from td3_robot_sims.backends.bullet import c_api as b3
from td3_robot_sims.backends.bullet.c_api import pybullet

BASE = -1  # index of a body's root link
_MAX_VELOCITIES = 128  # Bullet's largest number of velocities per body; six of them belong to the base
_MAX_TORQUES = 4  # largest number of torques in one call of b3.set_torques()
_JOINT_SIZES = {(0, 0), (1, 1), (2, 2), (3, 3), (4, 3)}  # numbers of (positions, velocities) of each kind of joint
_DOUBLE = sizeof(c_double)
_CLOSED = "this physics world is closed, or the user closed its window"
_CHANGES = {
    "mass": b3.set_mass,
    "friction": b3.set_friction,
    "damping": b3.set_damping,
    "restitution": b3.set_restitution,
}
_windows: set[int] = set()  # addresses of worlds with a window; PyBullet can show one window per process


class _Handle:
    """Bullet's address of a world. Python frees the world when no reference to this object remains.

    The methods of :class:`Client` that use the world hold a reference, because another thread or a signal handler may
    close the world meanwhile. When the interpreter ends, Python frees only worlds with ``at_exit``. It does not free
    the others, because a thread may still be stepping them.
    """

    def __init__(self, address: int, at_exit: bool) -> None:
        self.address = address
        weakref.finalize(self, _disconnect, address).atexit = at_exit


class _Nothing:
    """Replaces the arrays of a closed world, and raises an error when read. Reading freed memory could crash."""

    def __getitem__(self, place: object) -> Any:
        raise RuntimeError(_CLOSED)


class Joint(NamedTuple):
    """A joint and the link that it moves. Both have the same index.

    Attributes:
        lower: lower limit of its position, rad or m.
        upper: upper limit of its position, rad or m.
        position_at: index of its position in ``Client.positions``, -1 for a fixed joint.
        velocity_at: index of its velocity in ``Client.velocities``, -1 for a fixed joint.
    """

    name: str
    link: str
    lower: float
    upper: float
    position_at: int
    velocity_at: int


class Part(NamedTuple):
    """Mass (kg), principal moments of inertia (kg·m²) and lateral friction of a link."""

    mass: float
    inertia: tuple[float, ...]
    friction: float


class Client:
    """One physics world. Steps of different worlds may run in several threads at once.

    :meth:`look` fills the arrays below. Read them before you call another method.

    Attributes:
        positions: the base's x, y, z (m) and quaternion x, y, z, w, then the joints' positions (rad or m).
        velocities: the base's linear (m/s) and angular (rad/s) velocity, then the joints' velocities.
        links: 7 numbers per link: x, y, z of its centre of mass (m), and its quaternion.
        link_velocities: 6 numbers per link: linear (m/s) and angular (rad/s) velocity. They are zeros after a call of
            ``look`` without ``link_velocities``.

    Raises:
        ConfigError: ``show`` requests a window, but DISPLAY is not set (on Linux) or a window is already open.
        RuntimeError: PyBullet creates no world. Every method except :meth:`close` raises this error if the world is
            closed.
    """

    def __init__(self, show: bool = False) -> None:
        if show and sys.platform == "linux" and not os.environ.get("DISPLAY"):
            raise ConfigError("render mode 'human' needs a display, and DISPLAY is not set; 'rgb_array' needs none")
        if show and _windows:
            raise ConfigError(
                "render mode 'human': PyBullet shows at most one window per process, and a window is already open"
            )
        address: int | None = b3.connect_window(0, None) if show else b3.connect()
        if not address:
            raise RuntimeError("PyBullet gave no physics client")
        # A window has a drawing thread, which must end before the interpreter does.
        self._handle: _Handle | None = _Handle(address, at_exit=show)
        self._torques: Any = (c_double * _MAX_VELOCITIES)()
        self._seen: tuple[int, bool] | None = None  # arguments of the last look(); None after most other commands
        doubles = POINTER(c_double)
        self.positions, self.velocities, self.links, self.link_velocities = (doubles() for _ in range(4))
        places = [byref(place) for place in (self.positions, self.velocities, self.links, self.link_velocities)]
        self._places = (*[None] * 5, *places[:2], *[None] * 3, *places[2:])
        self._contacts = b3.ContactInformation()
        if show:
            _windows.add(address)
            # Hide the side panels, which show pictures of Bullet's cameras. Bullet then does not draw these pictures.
            command = b3.window(address)
            b3.set_window(command, pybullet.COV_ENABLE_GUI, 0)
            self._run(self._open(), command)

    def _open(self) -> _Handle:
        """Return the handle, or raise RuntimeError if the world is closed."""
        handle = self._handle
        if handle is not None and b3.ready(handle.address):
            return handle
        del handle  # a stored traceback must not keep the world alive
        raise RuntimeError(_CLOSED)

    def _run(self, handle: _Handle, command: int, expected: int | None = None) -> int:
        """Send a command and return the answer. If ``expected`` is given, the answer must have this type."""
        self._seen = None
        answer: int = b3.submit(handle.address, command)
        if expected is not None and b3.answer(answer) != expected:
            raise RuntimeError(f"Bullet answered a command with type {b3.answer(answer)}; type {expected} was expected")
        return answer

    def close(self) -> None:
        """Free the world as soon as no method uses it. A second call does nothing."""
        self._seen = None
        nothing: Any = _Nothing()
        self.positions = self.velocities = self.links = self.link_velocities = nothing
        self._handle = None

    # -- content of the world ------------------------------------------------------------------------------------------

    def configure(self, gravity: float, time_step: float, substeps: int, iterations: int, contact_erp: float) -> None:
        """Set gravity (m/s², downwards), the duration of a step (s) and the solver.

        Make the order of contacts deterministic.
        """
        handle = self._open()
        command = b3.parameters(handle.address)
        b3.set_ordered_pairs(command, 1)
        b3.set_gravity(command, 0.0, 0.0, -gravity)
        b3.set_contact_erp(command, contact_erp)
        b3.set_iterations(command, iterations)
        b3.set_substeps(command, substeps)
        b3.set_time_step(command, time_step)
        self._run(handle, command)

    def load(self, path: str, flags: int = 0) -> int:
        """Load an SDF, URDF or MuJoCo file with one body, and return the number of this body.

        ``flags`` are the loading flags of PyBullet. They have no effect on SDF files.
        """
        handle, name = self._open(), os.fsencode(path)
        if path.endswith(".urdf"):
            command = b3.load_urdf(handle.address, name)
            b3.set_urdf_flags(command, flags)
            return int(b3.loaded_urdf(self._run(handle, command, b3.URDF_LOADED)))
        if path.endswith(".sdf"):
            answer = self._run(handle, b3.load_sdf(handle.address, name), b3.SDF_LOADED)
        else:
            command = b3.load_mjcf(handle.address, name)
            b3.set_load_flags(command, flags)
            answer = self._run(handle, command, b3.MJCF_LOADED)
        bodies = (c_int * b3.MAX_BODIES)()
        (body,) = bodies[: b3.loaded(answer, bodies, b3.MAX_BODIES)]
        return body

    def joints(self, body: int) -> list[Joint]:
        """Return the joints of a body, in the order of their links.

        Raises:
            ConfigError: a joint has several degrees of freedom, or the installed PyBullet has an unknown memory layout.
        """
        handle, info, joints = self._open(), b3.JointInfo(), []
        for index in range(b3.joint_count(handle.address, body)):
            b3.joint_info(handle.address, body, index, byref(info))
            if info.index != index or (info.positions, info.velocities) not in _JOINT_SIZES:
                raise ConfigError(
                    f"the installed pybullet describes joint {index} in an unknown format; allowed: pybullet 3.2.7"
                )
            name, link = (text.decode(errors="replace") for text in (info.name, info.link_name))
            if info.velocities > 1:
                raise ConfigError(f"joint {name!r} has {info.velocities} degrees of freedom; allowed: 0 or 1")
            joints.append(Joint(name, link, info.lower, info.upper, info.position_at, info.velocity_at))
        return joints

    def part(self, body: int, link: int) -> Part:
        """Return mass, moments of inertia and friction of a link."""
        handle, info = self._open(), b3.DynamicsInfo()
        b3.dynamics(self._run(handle, b3.ask_dynamics(handle.address, body, link), b3.DYNAMICS), byref(info))
        return Part(info.mass, tuple(info.inertia), info.lateral_friction)

    def change(self, body: int, link: int, inertia: Sequence[float] | None = None, **values: float) -> None:
        """Change properties of a link.

        Args:
            inertia: see :class:`Part`.
            values: any of ``mass``, ``friction`` (see :class:`Part`), ``restitution``, and ``damping`` of the joint in
                N·m·s/rad.
        """
        handle = self._open()
        command = b3.change(handle.address)
        if inertia is not None:
            b3.set_inertia(command, body, link, (c_double * 3)(*inertia))
        for name, value in values.items():
            _CHANGES[name](command, body, link, value)
        self._run(handle, command)

    def release(self, body: int, joint: Joint) -> None:
        """Turn off the motor that PyBullet gives each joint. The motor would brake the joint."""
        handle = self._open()
        command = b3.control(handle.address, body, pybullet.POSITION_CONTROL)
        b3.set_target_speed(command, joint.velocity_at, 0.0)  # without a target speed, Bullet ignores the force
        b3.set_force(command, joint.velocity_at, 0.0)
        self._run(handle, command)

    # -- states --------------------------------------------------------------------------------------------------------

    def save(self) -> int:
        """Store the state of the world. Return the number of the state, for :meth:`restore`."""
        handle = self._open()
        return int(b3.saved_as(self._run(handle, b3.save(handle.address), b3.SAVED)))

    def restore(self, state: int) -> None:
        """Return to a state from :meth:`save`."""
        handle = self._open()
        command = b3.restore(handle.address)
        b3.set_saved(command, state)
        self._run(handle, command, b3.RESTORED)

    def set_joints(self, body: int, joints: Sequence[int], positions: Sequence[float], speed: float = 0.0) -> None:
        """Set joints to ``positions`` (rad or m) with velocity ``speed`` (rad/s or m/s)."""
        handle = self._open()
        command = b3.pose(handle.address, body)
        moving = c_double(speed)
        for joint, position in zip(joints, positions, strict=True):
            b3.set_joint(handle.address, command, joint, byref(c_double(position)), 1)
            b3.set_speed(handle.address, command, joint, byref(moving), 1)
        self._run(handle, command)

    def place(self, body: int, position: Sequence[float], quaternion: Sequence[float]) -> None:
        """Set the position (m) and quaternion of a body's base, and stop the base."""
        handle = self._open()
        command = b3.pose(handle.address, body)
        b3.set_base(command, *position)
        b3.set_turn(command, *quaternion)
        self._run(handle, command)

    def forget_contacts(self, body: int) -> None:
        """Forget all contacts of a body, and their order. The next step finds its contacts anew."""
        handle = self._open()
        command = b3.filter_contacts(handle.address)
        # Bullet forgets the contacts of a body when a collision filter is set for this body. This filter has no second
        # body (-1), so it has no other effect.
        b3.set_pair(command, body, -1, BASE, BASE, 1)
        self._run(handle, command)

    def push(self, body: int, link: int, force: Sequence[float], position: Sequence[float]) -> None:
        """Apply a force (N) at a position (m) during the next step, both in world coordinates."""
        handle = self._open()
        command = b3.force(handle.address)
        b3.add_force(command, body, link, (c_double * 3)(*force), (c_double * 3)(*position), pybullet.WORLD_FRAME)
        self._run(handle, command)

    # -- a step --------------------------------------------------------------------------------------------------------
    # Speed matters here, so drive(), look() and touching() do not check whether the user closed the window.

    def drive(self, body: int, first: int, torques: list[float]) -> None:
        """Apply torques (N·m) to consecutive joints in the next step. ``first``: ``velocity_at`` of the first joint."""
        handle = self._handle or self._open()
        command = b3.control(handle.address, body, pybullet.TORQUE_CONTROL)
        values, count = self._torques, len(torques)
        values[:count] = torques
        for done in range(0, count, _MAX_TORQUES):
            b3.set_torques(command, first + done, byref(values, done * _DOUBLE), min(_MAX_TORQUES, count - done))
        b3.submit(handle.address, command)

    def step(self) -> None:
        """Simulate one time step. This releases the interpreter lock."""
        self._seen = None
        handle = self._open()
        answer = b3.submit_freely(handle.address, b3.step(handle.address))
        if b3.answer(answer) != b3.STEPPED:
            raise RuntimeError("Bullet did not simulate a step")

    def look(self, body: int, link_velocities: bool = False) -> None:
        """Fill the arrays with the state of a body. Without ``link_velocities``, the array of this name gets zeros."""
        seen = (body, link_velocities)
        if self._seen == seen:
            return
        handle = self._handle or self._open()
        command = b3.ask_state(handle.address, body)
        if link_velocities:
            b3.with_velocities(command, 1)
        b3.state(self._run(handle, command, b3.STATE), *self._places)
        self._seen = seen

    def touching(self, body: int, other: int) -> list[int]:
        """Return the links of ``body`` that touched ``other`` in the last substep.

        A link with several points of contact appears several times.
        """
        handle = self._handle or self._open()
        command = b3.ask_contacts(handle.address)
        b3.of_body_a(command, body)
        b3.of_body_b(command, other)
        answer = b3.submit(handle.address, command)
        if b3.answer(answer) != b3.CONTACTS:
            raise RuntimeError("Bullet did not return contacts")
        contacts = self._contacts
        b3.contacts(handle.address, contacts)
        count: int = contacts.count
        return contacts.points[b3.LINK_A : count * b3.CONTACT_INTS : b3.CONTACT_INTS] if count else []

    def lowest(self, body: int, links: Sequence[int]) -> float:
        """Return the height (m) of the lowest point of these links' bounding boxes."""
        handle = self._open()
        answer = self._run(handle, b3.ask_boxes(handle.address, body), b3.BOXES)
        corners = (c_double * 3)(), (c_double * 3)()
        heights = []
        for link in links:
            b3.box(answer, link, *corners)
            heights.append(corners[0][2])
        return min(heights)

    # -- pictures ------------------------------------------------------------------------------------------------------

    def hide(self, body: int) -> None:
        """Leave the base of a body out of pictures. The physics does not change."""
        handle = self._open()
        command = b3.paint(handle.address, body, BASE, -1)  # -1 means all shapes of this link
        b3.set_colour(command, (c_double * 4)(1.0, 1.0, 1.0, 0.0))
        self._run(handle, command)

    def picture(
        self, width: int, height: int, view: Sequence[float], lens: Sequence[float]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Draw all bodies that are not hidden. ``view`` and ``lens`` are PyBullet's camera matrices.

        Returns:
            The picture, uint8[height, width, 3], and the pixels that show a body, bool[height, width].
        """
        handle = self._open()
        command = b3.ask_picture(handle.address)
        b3.set_size(command, width, height)
        b3.set_camera(command, (c_float * 16)(*view), (c_float * 16)(*lens))
        b3.set_renderer(command, pybullet.ER_TINY_RENDERER)
        b3.set_shadow(command, 0)  # with a shadow, drawing would take twice as long
        self._run(handle, command, b3.PICTURE)
        image = b3.CameraImage()
        b3.picture(handle.address, byref(image))
        pixels = np.ctypeslib.as_array(image.pixels, (image.height, image.width, 4))
        bodies = np.ctypeslib.as_array(image.segments, (image.height, image.width))
        return pixels[:, :, :3].copy(), bodies >= 0

    def aim(self, distance: float, yaw: float, pitch: float, target: Sequence[float]) -> None:
        """Point the window's camera at ``target`` (m) from ``distance`` m; angles in degrees."""
        handle = self._open()
        command = b3.window(handle.address)
        b3.set_view(command, distance, pitch, yaw, (c_float * 3)(*target))
        self._run(handle, command)


def _disconnect(address: int) -> None:
    _windows.discard(address)
    b3.disconnect(address)
