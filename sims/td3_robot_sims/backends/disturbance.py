"""Randomization of one robot: draws physics parameters and pushes, delays actions, adds sensor noise and sensor bias.

Each episode takes four seeds from the environment's random stream, and all values drawn here come from these seeds. So
a restored environment, which repeats the episode from the same random state, draws the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from td3_robot.config.randomization import RandomizationConfig, SensorsConfig
from td3_robot.specs import Float32, RobotSpec


class Disturbance:
    """The disturbances of one robot; :meth:`begin` draws them for each episode.

    Args:
        groups: the group of each observation channel, see :class:`td3_robot.config.randomization.SensorsConfig`.

    Attributes:
        world: the values drawn for the episode, by name, in the configuration's units. A key that is off has no
            value here. ``tilt_direction`` in rad is the side to which the robot leans: 0 is ahead, π/2 is left.
    """

    def __init__(self, config: RandomizationConfig, spec: RobotSpec, groups: Sequence[str]) -> None:
        self.config = config
        self.spec = spec
        self.world: dict[str, float] = {}
        self._groups = groups
        self._low = np.array([channel.low for channel in spec.observations], np.float32)
        self._high = np.array([channel.high for channel in spec.observations], np.float32)
        self._std: Float32 = np.zeros(spec.observation_size, np.float32)
        self._bias: Float32 = np.zeros(spec.observation_size, np.float32)
        self._senses = config.sensor_noise != SensorsConfig() or config.sensor_bias != SensorsConfig()
        self._zero = np.clip(np.zeros(spec.action_size, np.float32), spec.action_low, spec.action_high)

    def begin(self, random: np.random.Generator) -> None:
        """Draw the values of an episode. This always takes four numbers from ``random``."""
        world, self._noise, self._delays, self._pushes = (
            np.random.default_rng(int(seed)) for seed in random.integers(2**63, size=4)
        )
        config = self.config
        self.world = {}
        # Draw every key in this order, even if it is off. So the other draws do not change if one key is turned on.
        for name in ("mass", "friction", "motor_strength", "joint_damping", "tilt"):
            self._draw(world, name, getattr(config, name))
        self._draw(world, "tilt_direction", config.tilt and (-math.pi, math.pi))
        low, high = config.action_latency or (0, 0)
        self._latency = low + math.floor(world.uniform() * (high - low + 1))
        if config.action_latency:
            self.world["action_latency"] = self._latency
        self._begin_pushes(world)
        self._begin_sensors(world)
        self._time = 0  # control periods since the reset
        self._sent: list[tuple[int, Float32]] = []  # (control period of arrival, action), oldest first
        self._current = self._zero

    def _draw(self, random: np.random.Generator, name: str, limits: tuple[float, float] | None) -> float | None:
        drawn = float(random.uniform())
        if limits is None:
            return None
        low, high = limits
        self.world[name] = value = low + drawn * (high - low)
        return value

    def _begin_pushes(self, world: np.random.Generator) -> None:
        push = self.config.push
        on = push.force is not None
        self._force = self._draw(world, "push.force", push.force) or 0.0
        duration = self._draw(world, "push.duration", push.duration if on else None) or 0.0
        interval = self._draw(world, "push.interval", push.interval if on else None) or 0.0
        start = self._draw(world, "push.start", (0.0, interval) if on else None) or 0.0
        period = self.spec.control_period
        self._duration = max(1, round(duration / period))
        self._interval = max(1, round(interval / period))
        self._start = math.floor(start / period)
        self._side = 0.0

    def _begin_sensors(self, world: np.random.Generator) -> None:
        noise, bias = self.config.sensor_noise, self.config.sensor_bias
        per_group = {name: world.uniform() for name in SensorsConfig.__struct_fields__}
        per_channel = world.uniform(size=len(self._groups))
        for index, (group, drawn) in enumerate(zip(self._groups, per_channel, strict=True)):
            name = "all" if getattr(noise, group) is None else group
            if limits := getattr(noise, name):
                std = limits[0] + per_group[name] * (limits[1] - limits[0])
                self._std[index] = self.world[f"sensor_noise.{name}"] = float(std)
            if limits := getattr(bias, group) or bias.all:
                value = float(limits[0] + drawn * (limits[1] - limits[0]))
                self._bias[index] = self.world[f"sensor_bias.{self.spec.observations[index].name}"] = value

    def delayed(self, action: Float32) -> Float32:
        """Send ``action``, float32[A], and return the newest action that has arrived.

        Call this once in each control period. Before the first action arrives, this method returns zero in each
        channel. If the limits of a channel exclude zero, the method returns the limit nearest to zero for this channel.
        """
        jitter = self.config.action_jitter
        if self.config.action_latency or jitter:
            late = self._latency + (int(self._delays.integers(jitter[0], jitter[1] + 1)) if jitter else 0)
            self._sent.append((self._time + late, action))
            arrived = [place for place, (due, _) in enumerate(self._sent) if due <= self._time]
            if arrived:
                self._current = self._sent[arrived[-1]][1]
                del self._sent[: arrived[-1] + 1]  # also drop actions that were sent earlier but would arrive later
            action = self._current
        self._time += 1
        return action

    def push(self) -> tuple[float, float] | None:
        """Return force (N) and direction (rad) of the push in this control period; None if there is no push.

        Call ``delayed`` first, because it counts the control periods.
        """
        since = self._time - 1 - self._start
        if self.config.push.force is None or since < 0 or since % self._interval >= self._duration:
            return None
        if since % self._interval == 0:
            self._side = float(self._pushes.uniform(-math.pi, math.pi))
        return self._force, self._side

    def sensed(self, observation: Float32) -> Float32:
        """Add sensor noise and bias to an observation, float32[O], and clip it to the limits of its channels."""
        if not self._senses:
            return observation
        noise: NDArray[np.float32] = self._noise.standard_normal(len(observation), np.float32)
        return np.clip(observation + self._bias + self._std * noise, self._low, self._high)
