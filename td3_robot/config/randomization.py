"""What of a simulated world is drawn anew for every episode, so that a policy learns to live with what it cannot know.

Every key is a range ``[low, high]`` to draw from uniformly, or null: off. All are off by default; the robots are then
the published ones, bit for bit. What was drawn is told with the first Step of the episode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from td3_robot.config.section import Section

_Factor = Annotated[float, Meta(gt=0, le=100)]
_Size = Annotated[float, Meta(ge=0, le=1e6)]
_Periods = Annotated[int, Meta(ge=0, le=1000)]
_Time = Annotated[float, Meta(gt=0, le=1e4)]
_Angle = Annotated[float, Meta(ge=0, le=1)]

GYMNASIUM_KEYS = ("action_latency", "action_jitter", "sensor_noise.all", "sensor_bias.all")
"""What can be drawn for a task that is not one of the walking robots: what happens outside its physics."""


class SensorsConfig(Section, frozen=True):
    """A range for each group of observations, in the unit of their channels (see ``python -m td3_robot_sims.tables``).

    Attributes:
        height: of the torso, m.
        direction: sine and cosine of the direction to the target.
        velocity: of the torso, times 0.3 s/m.
        attitude: roll and pitch, rad.
        joint_position: -1 and 1 are the joint's limits.
        joint_velocity: times 0.1 s/rad.
        contact: of the feet, 0 or 1.
        all: every channel whose own group is off; the only one that other tasks than the robots have.
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
    """Horizontal forces on the torso's centre of mass: each push from another side, planar robots from ahead or behind.

    Attributes:
        force: N; null for no pushes.
        duration: s of a push, rounded to whole control periods, at least one.
        interval: s from the beginning of one to the beginning of the next; the first comes within one of the reset.
    """

    force: tuple[_Size, _Size] | None = None
    duration: tuple[_Time, _Time] = (0.1, 0.1)
    interval: tuple[_Time, _Time] = (2.0, 4.0)


class RandomizationConfig(Section, frozen=True):
    """Worlds that differ from episode to episode. Evaluation does without, so that scores stay comparable.

    Attributes:
        mass: factor of the mass and the inertia of every part of the robot.
        friction: factor of the floor's lateral friction, and so of every foot's on it: Bullet multiplies the two.
        motor_strength: factor of every joint's torque; the cost of actions stays that of the action.
        joint_damping: N·m·s/rad in every driven joint (the models have none). Bullet takes it from the velocity at the
            beginning of a control period: more than a few shake light links.
        action_latency: control periods by which actions are late; whole numbers. Until the first arrives, zero (or the
            limit nearest to it) is applied. Steps report the action as it was sent: what a robot would know.
        action_jitter: control periods by which each single action is later still, drawn for each; whole numbers. An
            action that another has overtaken is dropped.
        sensor_noise: standard deviation of the normal noise of each observation, drawn for each group.
        sensor_bias: what is added to an observation throughout an episode, drawn for each channel.
        push: forces on the torso.
        tilt: rad by which the robot starts out of its upright attitude, to any side (planar robots: ahead or back).
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

    @property
    def on(self) -> bool:
        """Whether anything is drawn at all."""
        return self != RandomizationConfig(push=PushConfig(duration=self.push.duration, interval=self.push.interval))

    def problem(self, gymnasium: bool = False) -> str | None:
        """What is wrong with it, in one line that names key, value and what is allowed; None if nothing.

        Args:
            gymnasium: whether the task is one of Gymnasium's, to whose physics nothing can be done.
        """
        for key, values in _ranges(self):
            low, high = values
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                return f"randomization.{key} is {list(values)}; it must be two finite numbers, the lower one first"
            if key.startswith("sensor_noise.") and low < 0:
                return f"randomization.{key} is {list(values)}; a standard deviation must be at least 0"
            if gymnasium and not key.startswith(("push.duration", "push.interval")) and key not in GYMNASIUM_KEYS:
                return (
                    f"randomization.{key} is {list(values)}, and the task is Gymnasium's; "
                    f"allowed there: {', '.join(GYMNASIUM_KEYS)}"
                )
        if self.push.duration[1] > self.push.interval[0]:
            return (
                f"randomization.push.duration is {list(self.push.duration)}; no push may last longer than the shortest "
                f"push.interval, {self.push.interval[0]} s"
            )
        return None


def _ranges(section: Struct, prefix: str = "") -> Iterator[tuple[str, tuple[float, float]]]:
    """The full name and the value of every key that is set."""
    for key in section.__struct_fields__:
        value = getattr(section, key)
        if isinstance(value, Struct):
            yield from _ranges(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
