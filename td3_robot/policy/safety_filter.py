"""Between actor and wire: what the policy wants, made into what the robot may be told.

The filter has no memory: what was applied last comes with every Step, from the one who knows (DESIGN section 2). So a
lost Action leaves nothing wrong behind, and a recorded one can be computed again.
"""

from __future__ import annotations

import numpy as np

from td3_robot.safety.limits import Envelope
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util.arrays import finite


class SafetyFilter:
    """Low-pass, then rate limit, then limits, which win where they contradict each other.

    Args:
        envelope: of this robot and policy.
        spec: for the names in what :meth:`problem` says.
    """

    def __init__(self, envelope: Envelope, spec: RobotSpec) -> None:
        self.envelope = envelope
        self._spec = spec
        # As rows [1, A]: for one robot they then have the shape of what they are combined with (see Actor).
        self._low, self._high = envelope.low[None], envelope.high[None]
        self._step = None if envelope.step is None else envelope.step[None]
        self._blend = None if envelope.blend is None else envelope.blend[None]
        self._bound: Float32 = np.empty((0, spec.action_size), np.float32)

    def __call__(self, action: Float32, applied: Float32) -> Float32:
        """The action to send.

        Args:
            action: float32[N, A], the policy's with its noise; changed in place.
            applied: float32[N, A], what was applied in the control period before, or is as an episode begins: the
                Step says it.

        Returns:
            float32[N, A], ``action``.
        """
        if self._blend is not None or self._step is not None:
            if len(applied) != len(self._bound):  # only when a source of another size asks
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
        np.maximum(action, self._low, out=action)  # np.clip takes three times as long
        return np.minimum(action, self._high, out=action)

    def problem(self, observation: Float32) -> str | None:
        """Why no policy may answer this observation, float32[N, O]; None if it may."""
        low, high = self.envelope.observation_low, self.envelope.observation_high
        if low is None or high is None:
            if finite(observation):
                return None
            low, high = np.full_like(observation[0], -np.inf), np.full_like(observation[0], np.inf)
        elif (low <= observation).all() and (observation <= high).all():  # not-a-number is neither; infinite may be
            return None
        fits = np.isfinite(observation) & (low <= observation) & (observation <= high)
        robot, channel = map(int, np.argwhere(~fits)[0])
        named = self._spec.observations[channel]
        return (
            f"observation {named.name!r} of robot {robot} is {observation[robot, channel]:g} {named.unit}; "
            f"allowed: {low[channel]:g} to {high[channel]:g}"
        )
