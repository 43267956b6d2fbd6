"""The five published robots, as data: model file, joints, torque scales, feet, and when a robot counts as alive.

The values are those of ``pybullet_envs_gymnasium`` 0.6.0 (``Walker2DBulletEnv-v0`` and its siblings), whose models come
from ``pybullet_data``. Nothing here needs PyBullet: a specification can be had without starting physics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CONTROL_PERIOD = 0.0165  # s; one step of a robot, which physics divides into four
TIME_LIMIT = 1000  # steps

# (torso height in m, torso pitch in rad, contact of each foot one step earlier) -> the alive reward
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


@dataclass(frozen=True)
class RobotModel:
    """One robot.

    Attributes:
        mjcf: the model's file name in ``pybullet_data``'s ``mjcf`` folder.
        joints: name and torque gain of each driven joint, in the order of actions and observations.
        power: torque of joint i in N·m is ``power * gain_i * action_i``.
        feet: the links whose floor contact is observed, in order.
        alive: the alive reward; a negative one ends the episode unless ``ends`` is False.
        torque_cost, current_cost: weights of mean |action · 0.1 joint speed| and of mean action².
        start_height: height in m that the observed height is relative to; None: the one at reset.
        single_precision_torque: torques are rounded to float32, as the published Humanoid does.
    """

    name: str
    mjcf: str
    joints: tuple[tuple[str, float], ...]
    power: float
    feet: tuple[str, ...]
    alive: Alive
    ends: bool = True
    torque_cost: float = -2.0
    current_cost: float = -0.1
    start_height: float | None = None
    single_precision_torque: bool = False

    @property
    def torques(self) -> tuple[float, ...]:
        """Torque in N·m at action 1 of each joint."""
        return tuple(self.power * gain for _, gain in self.joints)


WALKER2D = RobotModel(
    name="Walker2D",
    mjcf="walker2d.xml",
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
)

HOPPER = RobotModel(
    name="Hopper",
    mjcf="hopper.xml",
    joints=(("thigh_joint", 100.0), ("leg_joint", 100.0), ("foot_joint", 100.0)),
    power=0.75,
    feet=("foot",),
    alive=_upright,
)

HALF_CHEETAH = RobotModel(
    name="HalfCheetah",
    mjcf="half_cheetah.xml",
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
)

ANT = RobotModel(
    name="Ant",
    mjcf="ant.xml",
    joints=tuple((f"{joint}_{leg}", 100.0) for leg in range(1, 5) for joint in ("hip", "ankle")),
    power=2.5,
    feet=("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot"),
    alive=_ant_off_the_ground,
)

HUMANOID = RobotModel(
    name="Humanoid",
    mjcf="humanoid_symmetric.xml",
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
    single_precision_torque=True,
)

MODELS = {model.name: model for model in (WALKER2D, ANT, HALF_CHEETAH, HOPPER, HUMANOID)}
