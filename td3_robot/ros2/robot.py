"""Turns ROS messages into observations, and actions into the values of a command.

This module imports no ROS package. It reads messages by the names of their fields. O is the number of observation
channels, and A the number of action channels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from td3_robot.config.ros2 import ActionConfig, ObservationConfig, Ros2Config
from td3_robot.driver.robot import Robot
from td3_robot.errors import ConfigError
from td3_robot.specs import Channel, Float32, RobotSpec
from td3_robot.util.text import did_you_mean

Kind = Literal["joint", "imu", "array"]


class StaleError(ValueError):
    """An observation channel has no value, or its value is too old."""


class StoppedError(ValueError):
    """A person called the service ``estop``."""


class Inputs:
    """The newest value of each observation channel, and the time at which the value came.

    The thread of ROS stores the values of messages. The thread of the driver reads the values.

    Attributes:
        topics: maps each topic to the kind of its messages.

    Raises:
        ConfigError: a channel has no source, a source names an unknown channel, or a topic has messages of two types.
    """

    def __init__(self, spec: RobotSpec, config: Ros2Config, clock: Callable[[], float] = time.monotonic) -> None:
        by_name = _channels(spec, "observation", spec.observations, config.observations)
        absent = next((channel.name for channel in spec.observations if channel.name not in by_name), None)
        if absent is not None:
            raise ConfigError(f"ros2.observations has no source for the observation {absent!r} of {spec.name!r}")
        self.topics: dict[str, Kind] = {}
        self._clock = clock
        self._stale = config.stale_ms / 1e3
        self._configs = [by_name[channel.name] for channel in spec.observations]
        self._of_topic: dict[str, list[int]] = {}  # maps a topic to the indices of its channels
        self._values = np.full(spec.observation_size, np.nan)
        self._at = np.full(spec.observation_size, -np.inf)
        self._changed = threading.Condition()
        for index, it in enumerate(self._configs):
            kind: Kind = "joint" if it.joint is not None else "imu" if it.imu is not None else "array"
            if self.topics.setdefault(it.source, kind) != kind:
                raise ConfigError(
                    f"ros2.observations of {it.channel!r}: the topic {it.source!r} has messages of two types; "
                    "allowed: one type"
                )
            self._of_topic.setdefault(it.source, []).append(index)

    def store(self, topic: str, message: Any) -> None:
        """Store the values of a message. A channel without a value in the message keeps its old value and time."""
        now = self._clock()
        names = message.name if self.topics[topic] == "joint" else ()
        joints = {name: index for index, name in enumerate(names)}
        found = {channel: _value(message, joints, self._configs[channel]) for channel in self._of_topic[topic]}
        with self._changed:
            for channel, value in found.items():
                if value is not None:
                    it = self._configs[channel]
                    self._values[channel] = it.sign * it.scale * value + it.offset
                    self._at[channel] = now
            self._changed.notify_all()

    def read(self) -> Float32:
        """Return the newest values, float32[O].

        Raise StaleError if a channel has no value, or if its value is too old.
        """
        with self._changed:
            values, at = self._values.astype(np.float32), self._at
            stale = at < self._clock() - self._stale
            if not stale.any():
                return values
            index = int(np.argmax(stale))
            ever = np.isfinite(at[index])
        it = self._configs[index]
        what = f"{it.field} of joint {it.joint!r}" if it.joint is not None else it.imu or f"index {it.index}"
        since = f"for {self._stale * 1e3:g} ms" if ever else "yet"
        raise StaleError(f"{it.channel!r}: no {what} has come on {it.source!r} {since}")

    def wait(self, limit: float, stopped: Callable[[], bool]) -> bool:
        """Wait until every channel has a value, for at most ``limit`` seconds. Return whether all have a value.

        The wait ends within 0.1 s after ``stopped`` begins to return True.
        """
        end = self._clock() + limit
        with self._changed:
            while not np.isfinite(self._at).all():
                left = end - self._clock()
                if left <= 0 or stopped():
                    return False
                self._changed.wait(min(left, 0.1))
        return True

    def ages(self) -> dict[str, float]:
        """For each topic, return the age of its oldest value in seconds.

        The age is infinity if a channel of the topic has no value.
        """
        with self._changed:
            now, at = self._clock(), self._at.copy()
        return {topic: float(now - min(at[channels])) for topic, channels in self._of_topic.items()}


def _value(message: Any, joints: Mapping[str, int], config: ObservationConfig) -> float | None:
    """Return the value that a message has for a channel; None if the message has no such value.

    ``joints`` maps the name of a joint to the joint's index in the message.
    """
    if config.imu is not None:
        vector, _, part = config.imu.partition(".")
        return float(getattr(getattr(message, vector), part))
    if config.joint is not None:
        index, values = joints.get(config.joint), getattr(message, config.field)
    else:
        index, values = config.index, message.data
    return float(values[index]) if index is not None and index < len(values) else None


class Outputs:
    """Turns actions into the values of a command.

    Attributes:
        joints: names of the joints in a trajectory command, in the order of the values.

    Raises:
        ConfigError: the configuration names an unknown action channel, or only some of the channels.
    """

    def __init__(self, spec: RobotSpec, config: Ros2Config) -> None:
        chosen = config.actions or tuple(ActionConfig(channel=channel.name) for channel in spec.actions)
        named = _channels(spec, "action", spec.actions, chosen)
        names = [channel.name for channel in spec.actions]
        absent = next((name for name in names if name not in named), None)
        if absent is not None:
            raise ConfigError(
                f"ros2.actions lacks the action {absent!r} of {spec.name!r}; name every action, or no action"
            )
        self.joints = [it.joint for it in chosen]
        self._order = [names.index(it.channel) for it in chosen]
        self._factor = np.array([it.sign * it.scale for it in chosen])
        self._offset = np.array([it.offset for it in chosen])

    def values(self, action: Float32) -> list[float]:
        """Return the values of a command for an action, float32[A]."""
        values: list[float] = (self._factor * action[self._order] + self._offset).tolist()
        return values


class Ros2Robot(Robot):
    """A robot behind ROS topics. ``publish`` sends the values of a command.

    ``stopped_by`` is empty until a person stops the robot through ROS. Then, until a reset, ``stopped_by`` holds the
    reason and ``observe`` fails, so the driver stays in FAULT with the safe action.
    """

    def __init__(
        self, spec: RobotSpec, inputs: Inputs, outputs: Outputs, publish: Callable[[list[float]], None]
    ) -> None:
        self.spec = spec
        self.stopped_by = ""
        self.inputs = inputs
        self._outputs = outputs
        self._publish = publish

    def observe(self) -> Float32:
        if self.stopped_by:
            raise StoppedError(self.stopped_by)
        return self.inputs.read()

    def apply(self, action: Float32) -> None:
        self._publish(self._outputs.values(action))


def _channels(spec: RobotSpec, kind: str, channels: Sequence[Channel], configs: Sequence[Any]) -> Mapping[str, Any]:
    """Return the settings of channels by name. Raises ConfigError if a setting names a channel that the robot lacks."""
    names = [channel.name for channel in channels]
    for it in configs:
        if it.channel not in names:
            hint = did_you_mean(it.channel, names, "it has")
            raise ConfigError(f"ros2.{kind}s: robot {spec.name!r} has no {kind} {it.channel!r}; {hint}")
    return {it.channel: it for it in configs}
