"""Safety settings in physical units, and the envelope: the limits that result from them for one robot.

Settings come from two places: the policy bundle (settings of its training) and the configuration of the process
(settings of this robot). For each limit the stricter setting applies (:func:`joined`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from td3_robot.config.section import Finite, Positive, Section
from td3_robot.errors import ConfigError
from td3_robot.specs import FLOAT32_MAX, Channel, Float32, RobotSpec
from td3_robot.util.text import did_you_mean

Range = tuple[Finite, Finite]
OutOfLimit = Literal["clamp", "stop"]
_RESET_TIMEOUT_S = 30.0


class SafetyConfig(Section, frozen=True):
    """Safety settings. All are off by default. A setting that is off does not change any bit of an action.

    A setting for actions is one value for all channels, or a map from channel name to value. A map restricts only the
    channels that it names. Each value has the unit of its channel.

    Attributes:
        limits: [low, high] of the action. The pairs of a map must be inside the specification's limits. If one pair is
            given for all channels, each channel uses the part of it that is inside the specification's limits.
        out_of_limit: what happens if the policy's action with its noise is outside the limits. This check comes before
            ``low_pass`` and ``rate``. ``clamp``: the robot gets the nearest action within the limits. ``stop``: an
            emergency stop of this robot. The default is ``clamp``, also for channels that a map does not name.
        rate: the largest change of an action, in units per second.
        low_pass: cut-off frequency of a first-order filter over the actions, in Hz.
        safe_action: ``hold``: the last applied action. ``zero``: zero for each channel; if the limits of a channel
            exclude zero, the limit nearest to zero. A map from channel name to value: all other channels get the same
            value as with ``zero``. The default is ``hold``.
        refuse_out_of_range: ``true``: no policy answers an observation outside the specification's range.
        frozen_ms: no policy answers an observation that has stayed the same, bit for bit, for longer than this time.
        observation_deadline_ms: the policy server's watchdog: FAULT after this time without a valid observation.
        reset_timeout_ms: the longest allowed time for ``reset()`` of a robot. Between the last Step of an episode and
            the first Step of the next episode, this time replaces ``observation_deadline_ms``. The default is 30 s. If
            a ``reset()`` that contains ``yield`` lasts longer, a driver with ``action_deadline_ms`` interrupts it and
            goes to FAULT.
        action_deadline_ms: the driver's watchdog: FAULT after this time without an Action.
        hang_ms: the longest allowed time for ``observe()`` of a robot. The same limit holds for ``apply()``, for
            ``phase()`` and ``reward()`` together, and for each part of a ``reset()`` with ``yield``. If a call takes
            longer, the driver calls ``stop()`` of the robot, and the driver process ends.
        recovery: ``manual``: only a command ends FAULT. ``automatic``: FAULT also ends when valid data have arrived for
            ``recovery_ms`` without a pause. Neither value ends an emergency stop. The default is ``manual``.
        recovery_ms: see ``recovery``. The default is 1 s.
    """

    limits: Range | dict[str, Range] | None = None
    out_of_limit: OutOfLimit | dict[str, OutOfLimit] | None = None
    rate: Positive | dict[str, Positive] | None = None
    low_pass: Positive | dict[str, Positive] | None = None
    safe_action: Literal["hold", "zero"] | dict[str, Finite] | None = None
    refuse_out_of_range: bool = False
    frozen_ms: Positive | None = None
    observation_deadline_ms: Positive | None = None
    reset_timeout_ms: Positive | None = None
    action_deadline_ms: Positive | None = None
    hang_ms: Positive | None = None
    recovery: Literal["manual", "automatic"] | None = None
    recovery_ms: Positive | None = None

    def __post_init__(self) -> None:
        ranges = self.limits.items() if isinstance(self.limits, dict) else [("all", self.limits)] if self.limits else []
        for name, (low, high) in ranges:
            if not low < high:
                raise ValueError(f"safety.limits of {name} is [{low}, {high}]; low must be below high")

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from the default, as plain values for ``safety`` in a bundle's header."""
        nothing = msgspec.to_builtins(SafetyConfig())
        return {key: value for key, value in msgspec.to_builtins(self).items() if value != nothing[key]}


@dataclass(frozen=True, eq=False)
class Envelope:
    """The limits that all settings together give for one robot.

    In array shapes, N counts the robots, O the observation channels, and A the action channels.

    Attributes:
        low, high: float32[A], limits of the action, inside the specification's limits.
        stops: bool[A], whether an action outside the limits stops the robot; None: no channel stops it.
        step: float32[A], the largest change of an action in a control period; None: no limit.
        blend: float32[A] in (0, 1], weight of the policy's action in the low-pass filter; the last action has the
            remaining weight. None: no filter.
        safe: float32[A], the safe action, within the limits; None: hold the last applied action.
        observation_low, observation_high: float32[O], the valid range; None: any finite observation is valid.
        frozen_s, observation_deadline_s, action_deadline_s: in seconds; None: off.
        reset_timeout_s: in seconds; at least ``observation_deadline_s``.
        recovery_s: in seconds; None: no automatic recovery.
        guarded: whether robot, policy or floor (see :func:`joined`) sets anything.
    """

    low: Float32
    high: Float32
    stops: NDArray[np.bool_] | None
    step: Float32 | None
    blend: Float32 | None
    safe: Float32 | None
    observation_low: Float32 | None
    observation_high: Float32 | None
    frozen_s: float | None
    observation_deadline_s: float | None
    reset_timeout_s: float
    action_deadline_s: float | None
    recovery_s: float | None
    guarded: bool

    def safe_action(self, applied: Float32) -> Float32:
        """Return the safe action as a new array, float32[N, A].

        ``applied`` holds the last action that each robot applied, float32[N, A].
        """
        chosen = applied if self.safe is None else np.broadcast_to(self.safe, applied.shape)
        return np.clip(chosen, self.low, self.high)

    def violation(self, action: Float32, channels: Sequence[Channel]) -> str | None:
        """Return why an action, float32[N, A], must stop the robot; None if no channel stops it.

        ``channels`` are the action channels of the specification. The text contains the channel's name and unit.
        """
        if self.stops is None:
            return None
        outside = self.stops & ~((self.low <= action) & (action <= self.high))
        if not outside.any():
            return None
        robot, index = map(int, np.argwhere(outside)[0])
        return (
            f"action {channels[index].name!r} of robot {robot} is {action[robot, index]:g} {channels[index].unit}; "
            f"allowed: {self.low[index]:g} to {self.high[index]:g}"
        )


def joined(
    robot: SafetyConfig, policy: SafetyConfig, spec: RobotSpec, *, floor: SafetyConfig | None = None
) -> Envelope:
    """Return the envelope that satisfies the settings of robot, policy and floor.

    ``floor`` has the settings of the policy that a person deployed last.

    The result has the intersection of the limits, the smallest rates and cut-off frequencies, and the shortest times.
    ``recovery_ms`` is an exception: the longest applies. A channel stops the robot if one of the settings says
    ``stop``. ``refuse_out_of_range`` is on if robot, policy or floor sets it. Recovery is automatic only if the robot
    sets ``automatic``, and neither policy nor floor sets ``manual``. The safe action comes from the first settings that
    have one, in the order robot, floor, policy.

    Raises:
        ConfigError: a setting names a channel that the robot lacks; the limits of a channel exceed the specification;
            the limits of a channel have no common value; or the safe action exceeds the limits.
    """
    every = (robot, floor or SafetyConfig(), policy)
    low, high = _limits(every, spec)
    rate, cut_off = (_least(every, key, spec) for key in ("rate", "low_pass"))
    chosen = next((one.safe_action for one in every if one.safe_action is not None), None)
    refuse = any(one.refuse_out_of_range for one in every)
    period = spec.control_period
    deadline_s = _seconds(one.observation_deadline_ms for one in every)
    reset_s = _seconds(one.reset_timeout_ms for one in every) or _RESET_TIMEOUT_S
    recovery_s = None
    if robot.recovery == "automatic" and all(one.recovery != "manual" for one in every):
        recovery_s = max(robot.recovery_ms or 1000.0, *(one.recovery_ms or 0.0 for one in every)) / 1e3
    return Envelope(
        low=low,
        high=high,
        step=None if rate is None else (rate * period).astype(np.float32),
        stops=_stops(every, spec),
        # First-order low-pass, exact for an input that is constant over a period (zero-order hold).
        blend=None if cut_off is None else (-np.expm1(-2 * math.pi * cut_off * period)).astype(np.float32),
        safe=_safe(chosen, low, high, spec),
        observation_low=_range(spec.observations, "low") if refuse else None,
        observation_high=_range(spec.observations, "high") if refuse else None,
        frozen_s=_seconds(one.frozen_ms for one in every),
        observation_deadline_s=deadline_s,
        reset_timeout_s=max(reset_s, deadline_s or 0.0),
        action_deadline_s=_seconds(one.action_deadline_ms for one in every),
        recovery_s=recovery_s,
        guarded=any(one != SafetyConfig() for one in every),
    )


def check_deadlines(safety: SafetyConfig, spec: RobotSpec) -> None:
    """Raise a ConfigError if a deadline is not longer than the control period: it would expire in every period."""
    period_ms = spec.control_period * 1e3
    for key in ("action_deadline_ms", "observation_deadline_ms"):
        deadline = getattr(safety, key)
        if deadline is not None and deadline <= period_ms:
            limit = f"more than {period_ms:g}, which is the control period of {spec.name} in ms"
            raise ConfigError(f"safety.{key} is {deadline:g}; allowed: {limit}")


def _range(channels: Sequence[Channel], end: str) -> Float32:
    # An unbounded channel gets the largest finite number, because infinity is not a valid observation.
    bounds = [max(-FLOAT32_MAX, min(FLOAT32_MAX, getattr(channel, end))) for channel in channels]
    return np.array(bounds, np.float32)


def _seconds(limits: Iterable[float | None]) -> float | None:
    """Return the smallest of the given limits (ms) in seconds; None if all are None."""
    given = [limit for limit in limits if limit is not None]
    return min(given) / 1e3 if given else None


def _of_channels(setting: Any, key: str, spec: RobotSpec) -> Iterator[tuple[int, Any]]:
    """Yield the values of a setting, each with the index of its action channel; nothing if the setting is None."""
    names = [channel.name for channel in spec.actions]
    if setting is not None and not isinstance(setting, Mapping):
        setting = dict.fromkeys(names, setting)
    for name, value in (setting or {}).items():
        if name not in names:
            hint = did_you_mean(name, names, "it has")
            raise ConfigError(f"safety.{key}: robot {spec.name!r} has no action {name!r}; {hint}")
        yield names.index(name), value


def _limits(every: Sequence[SafetyConfig], spec: RobotSpec) -> tuple[Float32, Float32]:
    low, high = spec.action_low.astype(np.float64), spec.action_high.astype(np.float64)
    for config in every:
        for index, (least, most) in _of_channels(config.limits, "limits", spec):
            channel = spec.actions[index]
            if isinstance(config.limits, dict) and not (channel.low <= least and most <= channel.high):
                raise ConfigError(
                    f"safety.limits of {channel.name!r} is [{least}, {most}] {channel.unit}; "
                    f"allowed: inside the specification's [{channel.low}, {channel.high}]"
                )
            low[index], high[index] = max(low[index], least), min(high[index], most)
    for index, channel in enumerate(spec.actions):
        if not low[index] <= high[index]:
            raise ConfigError(
                f"safety.limits of {channel.name!r} leave no value: low is {low[index]}, high is {high[index]} "
                f"{channel.unit}; robot, policy and specification must have a common range"
            )
    return low.astype(np.float32), high.astype(np.float32)


def _least(every: Sequence[SafetyConfig], key: str, spec: RobotSpec) -> Any:
    """Return the smallest value of each channel, float64[A]; None if no channel has a value.

    A channel without a value gets infinity.
    """
    least = np.full(spec.action_size, np.inf)
    for config in every:
        for index, value in _of_channels(getattr(config, key), key, spec):
            least[index] = min(least[index], value)
    return least if np.isfinite(least).any() else None


def _stops(every: Sequence[SafetyConfig], spec: RobotSpec) -> NDArray[np.bool_] | None:
    """Return the channels that stop the robot, bool[A]; None if there are none."""
    stops = np.zeros(spec.action_size, np.bool_)
    for config in every:
        for index, value in _of_channels(config.out_of_limit, "out_of_limit", spec):
            stops[index] |= value == "stop"
    return stops if stops.any() else None


def _safe(chosen: str | dict[str, float] | None, low: Float32, high: Float32, spec: RobotSpec) -> Float32 | None:
    if chosen in (None, "hold"):
        return None
    safe = np.clip(np.zeros_like(low), low, high)
    for index, value in _of_channels(chosen if isinstance(chosen, dict) else None, "safe_action", spec):
        channel = spec.actions[index]
        if not low[index] <= np.float32(value) <= high[index]:
            text = f"safety.safe_action of {channel.name!r} is {value} {channel.unit}"
            raise ConfigError(f"{text}; allowed: {low[index]} to {high[index]}")
        safe[index] = value
    return safe
