"""Domain randomization: a simulator draws properties of the robot and its world for each episode.

A policy then learns to act with unknown properties. Each key is a range ``[low, high]`` for a uniform draw. Null, the
default, switches a key off. The keys ``push.duration`` and ``push.interval`` cannot be null. Their ranges have no
effect while ``push.force`` is off. The first Step of an episode reports the drawn values.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from td3_robot.config.section import Section, flat

_Factor = Annotated[float, Meta(gt=0, le=100)]
_Size = Annotated[float, Meta(ge=0, le=1e6)]
_Periods = Annotated[int, Meta(ge=0, le=1000)]
_Time = Annotated[float, Meta(gt=0, le=1e4)]
_Angle = Annotated[float, Meta(ge=0, le=1)]

OUTSIDE_PHYSICS = ("action_latency", "action_jitter", "sensor_noise.all", "sensor_bias.all")
"""The keys that every simulated robot supports, because they need no access to its physics."""


class SensorsConfig(Section, frozen=True):
    """One range for each group of observations, in the unit of the channels (see docs/reference/robots.md).

    Attributes:
        height: range of the noise or bias on the channel that holds the height of the torso, in m.
        direction: range of the noise or bias on the channels that hold sine and cosine of the direction to the target.
        velocity: range of the noise or bias on the channels that hold the velocity of the torso. The value of these
            channels is the velocity multiplied by 0.3 s/m.
        attitude: range of the noise or bias on the channels that hold roll and pitch, in rad.
        joint_position: range of the noise or bias on the channels that hold the joint positions. The values -1 and 1 of
            these channels are the joint's limits.
        joint_velocity: range of the noise or bias on the channels that hold the joint velocities. The value of these
            channels is the velocity multiplied by 0.1 s/rad.
        contact: range of the noise or bias on the channels that hold the contact of each foot, 0 or 1.
        all: range of the noise or bias on all channels for which no other key of this section is set. Robots that do
            not walk support only this key.
    """

    height: tuple[float, float] | None = None
    direction: tuple[float, float] | None = None
    velocity: tuple[float, float] | None = None
    attitude: tuple[float, float] | None = None
    joint_position: tuple[float, float] | None = None
    joint_velocity: tuple[float, float] | None = None
    contact: tuple[float, float] | None = None
    all: tuple[float, float] | None = None


class PushConfig(Section, frozen=True):
    """Horizontal forces on the torso's centre of mass, in random directions. For planar robots: forwards or backwards.

    Attributes:
        force: force of a push, N; null for no pushes.
        duration: duration of a push, s. The simulator rounds it to whole control periods, at least one.
        interval: time from the start of one push to the start of the next, s. The first push starts within one
            interval after the reset.
    """

    force: tuple[_Size, _Size] | None = None
    duration: tuple[_Time, _Time] = (0.1, 0.1)
    interval: tuple[_Time, _Time] = (2.0, 4.0)


class RandomizationConfig(Section, frozen=True):
    """Properties that change from episode to episode. Evaluations ignore this section, so scores stay comparable.

    Attributes:
        mass: factor of the mass and the inertia of every part of the robot.
        friction: factor of the floor's lateral friction. Bullet multiplies the floor's friction by the foot's friction.
        motor_strength: factor of every joint's torque. The cost of an action does not change.
        joint_damping: damping of every driven joint, N·m·s/rad. The robots' models have no damping. Bullet computes the
            damping from the joint's velocity at the start of a control period. So light links vibrate at values above
            a few N·m·s/rad.
        action_latency: delay of actions, in whole control periods. Until the first action arrives, the robot
            applies zero. If the limits of a channel exclude zero, the robot applies the limit nearest to zero. A Step
            reports the newest sent action, which may differ from the applied action.
        action_jitter: additional delay in whole control periods, which the simulator draws for each action. The
            simulator drops an action that arrives after a newer action.
        sensor_noise: standard deviation of the Gaussian noise on observations. The simulator draws one standard
            deviation for each group.
        sensor_bias: offset of observations, constant during an episode. The simulator draws one offset for each
            channel.
        push: forces on the torso.
        tilt: angle by which the robot is tilted at the start of an episode, rad. The direction is random. A planar
            robot tilts forwards or backwards.
    """

    mass: tuple[_Factor, _Factor] | None = None
    friction: tuple[_Factor, _Factor] | None = None
    motor_strength: tuple[_Factor, _Factor] | None = None
    joint_damping: tuple[_Size, _Size] | None = None
    action_latency: tuple[_Periods, _Periods] | None = None
    action_jitter: tuple[_Periods, _Periods] | None = None
    sensor_noise: SensorsConfig = SensorsConfig()
    sensor_bias: SensorsConfig = SensorsConfig()
    push: PushConfig = PushConfig()
    tilt: tuple[_Angle, _Angle] | None = None

    def __post_init__(self) -> None:
        for key, values in self._set().items():
            low, high = values
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(
                    f"randomization.{key} is {list(values)}; it must be two finite numbers, the lower one first"
                )
            if key.startswith("sensor_noise.") and low < 0:
                raise ValueError(f"randomization.{key} is {list(values)}; a standard deviation must be at least 0")
        if self.push.duration[1] > self.push.interval[0]:
            raise ValueError(
                f"randomization.push.duration is {list(self.push.duration)}; no push may last longer than the shortest "
                f"push.interval, {self.push.interval[0]} s"
            )

    @property
    def on(self) -> bool:
        """Whether any key is on."""
        return bool(self.ranges())

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The range of every key that is on, by the key's name in this section, for example ``push.force``."""
        found = self._set()
        if self.push.force is None:
            del found["push.duration"], found["push.interval"]
        return found

    def _set(self) -> dict[str, tuple[float, float]]:
        """The range of every key that is not null, by the key's name in this section."""
        return {key: values for key, values in flat(msgspec.to_builtins(self)).items() if values is not None}
