"""The simulator without I/O. In lock-step it can save its state, and continue from a saved state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from td3_robot.core_types import Origin, Output
from td3_robot.driver import core
from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import Fast, RealTime
from td3_robot.messages import Message, SimulatorState, Throttle
from td3_robot_sims import snapshot

if TYPE_CHECKING:
    from td3_robot_sims.vector_env import VectorEnvironment

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    **core.ACCEPTS,
    "learner": (*core.ACCEPTS["learner"], SimulatorState),
}
"""The messages that a simulator accepts from the server, by link."""


class SimulatorCore(SourceCore):
    """A :class:`td3_robot.driver.core.SourceCore` with simulated robots. It starts at the learner's first Throttle.

    Raises:
        BundleError: (in :meth:`step`) a saved state is damaged, or of another task or number of robots.
    """

    def __init__(
        self,
        envs: VectorEnvironment,
        source: str,
        incarnation: int,
        *,
        lockstep: bool,
        pacing: Fast | RealTime | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(envs, source, incarnation, lockstep=lockstep, pacing=pacing, guard=guard)
        self.envs = envs

    def receive(self, origin: Origin, message: Message, now: float) -> list[Output]:
        if isinstance(message, SimulatorState):
            return self._go_back(message)
        outputs = super().receive(origin, message, now)
        if isinstance(message, Throttle) and message.save and self._is_answered_by(message):
            payload = snapshot.encode(self.envs, self.transitions, self.newest)
            outputs.append(("learner", self._state(payload)))
        return outputs

    def _is_answered_by(self, throttle: Throttle) -> bool:
        """Whether a Throttle answers the newest Step of this incarnation."""
        return (throttle.incarnation, throttle.answers) == (self.incarnation, self.next_sequence)

    def _go_back(self, state: SimulatorState) -> list[Output]:
        """Lock-step: restore a saved state, confirm it, and send its newest Step again."""
        if (state.incarnation, state.answers) != (self.incarnation, self.next_sequence):
            transitions, newest, reasons = snapshot.restore(state.payload, self.envs)
            self.rewind(state.incarnation, transitions, newest)
            self.counters["episodes_not_restored"] += len(reasons)
            if reasons:
                log.warning("not as before: %d robots begin a new episode; %s", len(reasons), reasons[0])
        outputs: list[Output] = [("learner", self._state(b""))]
        return outputs + [(link, self.newest) for link in ("learner", "policy") if self.newest]

    def _state(self, payload: bytes) -> SimulatorState:
        return SimulatorState(self.source, self.incarnation, self.next_sequence, payload)
