"""The five published robots as data: model file, joints, torque scales, feet, and when a robot is alive.

The values are those of ``pybullet_envs_gymnasium`` 0.6.0 (``Walker2DBulletEnv-v0`` and similar tasks). The model files
are those of ``pybullet_data``. This module does not import PyBullet, because a specification needs no physics.

To add a robot, add a :class:`RobotModel` to ``ROBOTS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

from td3_robot.errors import ConfigError
from td3_robot.specs import Channel, RobotSpec

CONTROL_PERIOD = 0.0165  # duration of a step in s; Bullet divides it into four substeps
TIME_LIMIT = 1000  # steps
OBSERVATION_LIMIT = 5.0  # observations are clipped to ±5
TORSO_GROUPS = ("height", "direction", "direction", "velocity", "velocity", "velocity", "attitude", "attitude")
"""The groups of the torso's observations, which come before the joints' observations.

See :class:`td3_robot.config.randomization.SensorsConfig`.
"""
TORSO_CHANNELS = len(TORSO_GROUPS)

# Arguments: torso height (m), torso pitch (rad), contact of each foot one step earlier. Returns the alive reward.
Alive = Callable[[Any, float, Sequence[float]], float]


def _upright(height: Any, pitch: float, _contacts: Sequence[float]) -> float:
    return 1.0 if height > 0.8 and abs(pitch) < 1.0 else -1.0


def _ant_off_the_ground(height: Any, _pitch: float, _contacts: Sequence[float]) -> float:
    return 1.0 if height > 0.26 else -1.0  # the torso is a sphere of 0.25 m radius


def _humanoid_upright(height: Any, _pitch: float, _contacts: Sequence[float]) -> float:
    return 2.0 if height > 0.78 else -1.0


def _cheetah_on_its_feet(_height: Any, pitch: float, contacts: Sequence[float]) -> float:
    walks_on_shins = contacts[1] or contacts[2] or contacts[4] or contacts[5]
    return 1.0 if abs(pitch) < 1.0 and not walks_on_shins else -1.0


def _finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


@dataclass(frozen=True)
class RobotModel:
    """One robot.

    The torso is the link "torso"; without such a link, it is the root link. ``joints`` must list all joints that can
    move, in the model's order, except those whose names begin with "ignore". In ``file``, each listed joint needs
    finite limits, the lower one below the upper one. The limits scale the observed position.

    The first three joints of a planar robot connect it to the world: along x, along z and about y. Their names begin
    with "ignore". The root link of any other robot needs a mass above 0.

    Attributes:
        file: MJCF or URDF file of the model, as an absolute path or relative to ``pybullet_data``'s folder ``mjcf``.
        joints: name and torque gain of each driven joint, in the order of actions and observations.
        power: factor of all torques. The torque of joint i in N·m is ``power * gain_i * action_i``.
        feet: the links whose floor contact is observed, in order.
        alive: function that returns the alive reward.
        ends: whether a negative alive reward ends the episode.
        torque_cost: weight of mean |action · 0.1 joint speed|.
        current_cost: weight of mean action².
        start_height: the observed height is relative to this height in m; None for the height at reset.
        base_height: height in m of the root link at a reset; None for the height in the file.
        single_precision: whether torques, and the height for ``alive``, are rounded to float32, as in the published
            Humanoid with numpy 2.

    Raises:
        ConfigError: an item of ``joints`` is not a pair (name, finite gain), an item of ``feet`` is not a name, or a
            number such as ``power`` is not finite.
    """

    name: str
    file: str
    joints: tuple[tuple[str, float], ...]
    power: float
    feet: tuple[str, ...]
    alive: Alive
    ends: bool = True
    torque_cost: float = -2.0
    current_cost: float = -0.1
    start_height: float | None = None
    base_height: float | None = None
    single_precision: bool = False

    def __post_init__(self) -> None:
        allowed = "allowed: pairs (name, finite torque gain)"
        if not isinstance(self.joints, tuple | list):
            raise ConfigError(f"robot {self.name!r}: joints is {self.joints!r}; {allowed}")
        for joint in self.joints:
            pair = isinstance(joint, tuple | list) and len(joint) == 2
            if not (pair and isinstance(joint[0], str) and _finite(joint[1])):
                raise ConfigError(f"robot {self.name!r}: an item of joints is {joint!r}; {allowed}")
        if not isinstance(self.feet, tuple | list) or not all(isinstance(foot, str) for foot in self.feet):
            raise ConfigError(f"robot {self.name!r}: feet is {self.feet!r}; allowed: names of links, such as ('foot',)")
        for key in ("power", "torque_cost", "current_cost", "start_height", "base_height"):
            value = getattr(self, key)
            if not (_finite(value) or (value is None and key.endswith("height"))):
                raise ConfigError(f"robot {self.name!r}: {key} is {value!r}; allowed: finite numbers")
        # A model is a key of a cache, so a list becomes a tuple.
        object.__setattr__(self, "joints", tuple((name, gain) for name, gain in self.joints))
        object.__setattr__(self, "feet", tuple(self.feet))

    @property
    def torques(self) -> tuple[float, ...]:
        """Torque in N·m of each joint when its action is 1."""
        return tuple(self.power * gain for _, gain in self.joints)


ROBOTS = (
    RobotModel(
        name="Walker2D",
        file="walker2d.xml",
        joints=(
            ("thigh_joint", 100.0),
            ("leg_joint", 100.0),
            ("foot_joint", 30.0),
            ("thigh_left_joint", 100.0),
            ("leg_left_joint", 100.0),
            ("foot_left_joint", 30.0),
        ),
        power=0.40,
        feet=("foot", "foot_left"),
        alive=_upright,
    ),
    RobotModel(
        name="Ant",
        file="ant.xml",
        joints=tuple((f"{joint}_{leg}", 100.0) for leg in range(1, 5) for joint in ("hip", "ankle")),
        power=2.5,
        feet=("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot"),
        alive=_ant_off_the_ground,
    ),
    RobotModel(
        name="HalfCheetah",
        file="half_cheetah.xml",
        joints=(
            ("bthigh", 120.0),
            ("bshin", 90.0),
            ("bfoot", 60.0),
            ("fthigh", 140.0),
            ("fshin", 60.0),
            ("ffoot", 30.0),
        ),
        power=0.90,
        feet=("ffoot", "fshin", "fthigh", "bfoot", "bshin", "bthigh"),
        alive=_cheetah_on_its_feet,
        ends=False,
    ),
    RobotModel(
        name="Hopper",
        file="hopper.xml",
        joints=(("thigh_joint", 100.0), ("leg_joint", 100.0), ("foot_joint", 100.0)),
        power=0.75,
        feet=("foot",),
        alive=_upright,
    ),
    RobotModel(
        name="Humanoid",
        file="humanoid_symmetric.xml",
        joints=(
            ("abdomen_z", 100.0),
            ("abdomen_y", 100.0),
            ("abdomen_x", 100.0),
            *(
                (f"{side}_{joint}", gain)
                for side in ("right", "left")
                for joint, gain in (("hip_x", 100.0), ("hip_z", 100.0), ("hip_y", 300.0), ("knee", 200.0))
            ),
            *((f"{side}_{joint}", 75.0) for side in ("right", "left") for joint in ("shoulder1", "shoulder2", "elbow")),
        ),
        power=0.41,
        feet=("right_foot", "left_foot"),
        alive=_humanoid_upright,
        torque_cost=4.25 * -2.0,
        current_cost=4.25 * -0.1,
        start_height=0.8,
        single_precision=True,
    ),
)
MODELS = {model.name: model for model in ROBOTS}


def observation_groups(model: RobotModel) -> tuple[str, ...]:
    """Return the group of each observation channel, see :class:`td3_robot.config.randomization.SensorsConfig`."""
    return TORSO_GROUPS + ("joint_position", "joint_velocity") * len(model.joints) + ("contact",) * len(model.feet)


@cache
def specification(model: RobotModel) -> RobotSpec:
    """Return the robot's specification."""

    def channel(name: str, meaning: str, unit: str = "1", limit: float = OBSERVATION_LIMIT) -> Channel:
        return Channel(name, unit, -limit, limit, meaning)

    zero = "its height at reset" if model.start_height is None else f"{model.start_height:g} m"
    observations = [
        channel("torso.height", f"height of the torso above {zero}", "m"),
        channel("target.sin", "sine of the direction to the target, seen from the torso", limit=1.0),
        channel("target.cos", "cosine of the direction to the target, seen from the torso", limit=1.0),
        channel("torso.velocity_x", "velocity of the torso ahead, times 0.3 s/m"),
        channel("torso.velocity_y", "velocity of the torso to its left, times 0.3 s/m"),
        channel("torso.velocity_z", "velocity of the torso upwards, times 0.3 s/m"),
        channel("torso.roll", "roll of the torso", "rad"),
        channel("torso.pitch", "pitch of the torso", "rad"),
    ]
    for joint, _ in model.joints:
        observations.append(channel(f"{joint}.position", "joint angle; -1 and 1 are its lower and upper limit"))
        observations.append(channel(f"{joint}.velocity", "joint velocity, times 0.1 s/rad"))
    observations += [
        Channel(f"{foot}.contact", "1", 0.0, 1.0, "1 if this part touched the floor one step earlier, else 0")
        for foot in model.feet
    ]
    actions = [
        Channel(f"{joint}.torque", "1", -1.0, 1.0, f"joint torque; 1 is {torque:g} N·m")
        for (joint, _), torque in zip(model.joints, model.torques, strict=True)
    ]
    return RobotSpec(model.name, tuple(observations), tuple(actions), CONTROL_PERIOD)
