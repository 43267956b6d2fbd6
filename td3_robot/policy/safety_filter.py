"""The filter after the actor. It changes the policy's action into one that the robot may apply.

The filter has no memory: it starts from the action that the robot really applied, and every Step contains this action.
So a lost Action causes no later error, and replay can compute a recorded Action again.
"""

from __future__ import annotations

import numpy as np

from td3_robot.safety.limits import Envelope
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util.arrays import finite


class SafetyFilter:
    """Applies a low-pass filter, then the rate limit, then the limits. The limits take priority over the rate limit."""

    def __init__(self, envelope: Envelope, spec: RobotSpec) -> None:
        self.envelope = envelope
        self.spec = spec
        # Shape [1, A], like the actions of a source with one robot: numpy is faster with equal shapes (see Actor).
        self._low, self._high = envelope.low[None], envelope.high[None]
        self._step = None if envelope.step is None else envelope.step[None]
        self._blend = None if envelope.blend is None else envelope.blend[None]
        self._bound: Float32 = np.empty((0, spec.action_size), np.float32)

    def __call__(self, action: Float32, applied: Float32) -> Float32:
        """Change ``action`` in place, and return it.

        Args:
            action: float32[N, A], for N robots with A action channels. For each robot, this is the policy's action with
                noise, or an operator's action.
            applied: float32[N, A], the field ``action`` of the Step. This is the action that the robot applied in the
                last control period. In the first Step of an episode, a driver sends its robot's current motor command,
                and a simulator sends 0.
        """
        if self._blend is not None or self._step is not None:
            if len(applied) != len(self._bound):  # a source with another number of robots
                self._bound = np.empty_like(applied)
            if self._blend is not None:
                action -= applied
                action *= self._blend
                action += applied
            if self._step is not None:
                np.subtract(applied, self._step, out=self._bound)
                np.maximum(action, self._bound, out=action)
                np.add(applied, self._step, out=self._bound)
                np.minimum(action, self._bound, out=action)
        np.maximum(action, self._low, out=action)  # np.clip takes more than twice as long
        return np.minimum(action, self._high, out=action)

    def problem(self, observation: Float32) -> str | None:
        """Return why a policy must not answer this observation; None if a policy may answer it.

        ``observation`` is float32[N, O], for N robots with O observation channels.
        """
        low, high = self.envelope.observation_low, self.envelope.observation_high
        if low is None or high is None:
            if finite(observation):
                return None
            low, high = np.full_like(observation[0], -np.inf), np.full_like(observation[0], np.inf)
        elif (low <= observation).all() and (observation <= high).all():  # false for NaN
            return None
        fits = np.isfinite(observation) & (low <= observation) & (observation <= high)
        robot, channel = map(int, np.argwhere(~fits)[0])
        named = self.spec.observations[channel]
        return (
            f"observation {named.name!r} of robot {robot} is {observation[robot, channel]:g} {named.unit}; "
            f"allowed: {low[channel]:g} to {high[channel]:g}"
        )
