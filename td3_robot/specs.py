"""The observations and actions of a robot: names, units, limits, rate.

The handshake compares specifications, so that a policy drives only robots for which it was trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import ConfigError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
UInt8 = NDArray[np.uint8]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]

MAX_CHANNELS = 4096
"""The maximum number of observation or action channels. Without this limit, a peer could exhaust a node's memory."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Channel:
    """One number of an observation or an action.

    Attributes:
        name: unique within its list, for example ``thigh_joint.torque``.
        unit: SI unit, or ``1`` for a pure number.
        low, high: the inclusive range; ``low < high``. An unbounded observation has infinite limits.
        meaning: a short description for people.
    """

    name: str
    unit: str
    low: float
    high: float
    meaning: str = ""


@dataclass(frozen=True)
class RobotSpec:
    """The robot's interface: observation and action channels in wire order, and the control period in seconds.

    Raises:
        ConfigError: two observations or two actions have the same name, the number of channels is 0 or too high, a
            ``low`` is not below its ``high``, the magnitude of an action's limit exceeds half of the largest float32,
            or the period is infinite or not above 0.
    """

    name: str
    observations: tuple[Channel, ...]
    actions: tuple[Channel, ...]
    control_period: float

    def __post_init__(self) -> None:
        problem = self._problem("observation", self.observations) or self._problem("action", self.actions)
        period = self.control_period
        if not isinstance(period, (int, float, np.number)) or not (np.isfinite(period) and period > 0):
            problem = f"control_period is {period!r:.40}; it must be a finite number above 0 s"
        if problem:
            raise ConfigError(f"robot {self.name}: {problem}")

    def _problem(self, kind: str, channels: tuple[Channel, ...]) -> str:
        names = [channel.name for channel in channels]
        if not names:
            return f"it has no {kind} channel; at least one is needed"
        if len(names) > MAX_CHANNELS:
            return f"{len(names)} {kind} channels; at most {MAX_CHANNELS} are allowed"
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            return f"{kind} channel {twice!r} appears twice; names must be unique"
        for channel in channels:
            shown = f"{kind} {channel.name!r} has range [{channel.low}, {channel.high}]"
            if not channel.low < channel.high:
                return f"{shown}; low must be below high"
            # Within this limit, high - low is finite in float32, too.
            if kind == "action" and max(abs(channel.low), abs(channel.high)) > FLOAT32_MAX / 2:
                return f"{shown}; actions need finite float32 limits of at most {FLOAT32_MAX / 2:.2g}"
        return ""

    @property
    def observation_size(self) -> int:
        return len(self.observations)

    @property
    def action_size(self) -> int:
        return len(self.actions)

    @property
    def action_low(self) -> Float32:
        """float32[A]: the lowest value of each of the A action channels, in its unit."""
        return np.array([channel.low for channel in self.actions], np.float32)

    @property
    def action_high(self) -> Float32:
        """float32[A]: the highest value of each of the A action channels, in its unit."""
        return np.array([channel.high for channel in self.actions], np.float32)

    def describe(self) -> dict[str, Any]:
        """The specification as plain maps and lists, for a handshake or a policy bundle."""
        return asdict(self)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> RobotSpec:
        """The inverse of :meth:`describe`.

        Raises:
            ConfigError: a key is missing, or a value has the wrong type or is not allowed.
        """
        try:
            return msgspec.convert(description, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"robot specification: {error}; see docs/reference/protocol.md") from None

    def difference(self, other: RobotSpec) -> str | None:
        """The first difference from another specification; None if both agree. ``meaning`` is not compared."""
        if self.name != other.name:
            return f"robot is {self.name!r} here, {other.name!r} there"
        if self.control_period != other.control_period:
            return f"control_period is {self.control_period} s here, {other.control_period} s there"
        for kind in ("observations", "actions"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            if len(mine) != len(theirs):
                return f"{len(mine)} {kind} here, {len(theirs)} there"
            for index, key in itertools.product(range(len(mine)), ("name", "unit", "low", "high")):
                a, b = getattr(mine[index], key), getattr(theirs[index], key)
                if a != b:
                    return f"{kind}[{index}].{key} is {a!r} here, {b!r} there"
        return None
