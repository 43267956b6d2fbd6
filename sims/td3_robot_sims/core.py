"""The core of a simulator, without I/O. In lock-step it saves its state, and continues from a saved state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from td3_robot.core_types import Origin, Output
from td3_robot.driver import core
from td3_robot.driver.core import SourceCore
from td3_robot.messages import Message, SimulatorState, Throttle
from td3_robot_sims import snapshot

if TYPE_CHECKING:
    from td3_robot_sims.vector_env import VectorEnvironment

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    **core.ACCEPTS,
    "learner": (*core.ACCEPTS["learner"], SimulatorState),
}
"""The messages that a simulator accepts from the server of each link."""


class SimulatorCore(SourceCore):
    """A :class:`td3_robot.driver.core.SourceCore` whose body is a :class:`VectorEnvironment`.

    Raises:
        BundleError: :meth:`step` raises this in three cases: a saved state is damaged; a saved state is from a
            simulator with another task or another number of robots; the state to save is too large for a message.
    """

    @property
    def envs(self) -> VectorEnvironment:
        return cast("VectorEnvironment", self.body)

    def receive(self, origin: Origin, message: Message, now: float) -> list[Output]:
        if isinstance(message, SimulatorState):
            if not self._is_newest(message):
                self._restore(message)
            steps: list[Output] = [(link, self.newest) for link in ("learner", "policy") if self.newest]
            return [("learner", self._state(b"")), *steps]
        outputs = super().receive(origin, message, now)
        if isinstance(message, Throttle) and message.save and self._is_newest(message):
            payload = snapshot.encode(self.envs, self.transitions, self.newest)
            outputs.append(("learner", self._state(payload)))
        return outputs

    def _is_newest(self, message: Throttle | SimulatorState) -> bool:
        """Whether a message is for the newest Step of this incarnation.

        ``answers`` of the message is the sequence of a Step, plus 1. Before the first Step, ``answers`` is 0.
        """
        return (message.incarnation, message.answers) == (self.incarnation, self.next_sequence)

    def _restore(self, state: SimulatorState) -> None:
        transitions, newest, reasons = snapshot.restore(state.payload, self.envs)
        self.rewind(state.incarnation, transitions, newest)
        self.counters["episodes_not_restored"] += len(reasons)
        if reasons:
            log.warning("%d robot(s) cannot be restored, so they begin a new episode: %s", len(reasons), reasons[0])

    def _state(self, payload: bytes) -> SimulatorState:
        return SimulatorState(self.source, self.incarnation, self.next_sequence, payload)
