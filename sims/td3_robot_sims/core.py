"""The simulator without I/O: a source whose state can be saved, and gone back to, in lock-step."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from td3_robot.config.schema import Config
from td3_robot.core_types import Output
from td3_robot.driver import core
from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import Fast, RealTime, make_pacing
from td3_robot.messages import Message, SimulatorState, Throttle
from td3_robot_sims import snapshot, tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.vector_env import VectorEnvironment

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    **core.ACCEPTS,
    "learner": (*core.ACCEPTS["learner"], SimulatorState),
}
"""What a simulator takes from the server of each link."""


def make(config: Config, name: str, incarnation: int) -> SimulatorCore:
    """The core of the simulator of this name in a run with this configuration; close its ``envs`` in the end."""

    def environment(seed: int) -> Environment:
        return tasks.make(config.task, seed, config.randomization)

    envs = VectorEnvironment(environment, config.robots, config.seed, name, incarnation)
    # At full speed nothing is due by a time: a simulator that is not to move stands still.
    fast = config.pacing.mode == "fast"
    safety = msgspec.structs.replace(config.safety, action_deadline_ms=None) if fast else config.safety
    return SimulatorCore(
        envs,
        name,
        incarnation,
        lockstep=config.timing == "lockstep",
        pacing=make_pacing(config.pacing, envs.spec),
        guard=Guard(envs.spec, name, safety),
    )


class SimulatorCore(SourceCore):
    """See :class:`td3_robot.driver.core.SourceCore`; its robots are simulated, and begin with the learner's first word.

    Raises:
        BundleError: (in :meth:`step`) a state to go back to is damaged, or of another task or number of robots.
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

    def _throttle(self, throttle: Throttle) -> list[Output]:
        outputs = super()._throttle(throttle)
        if throttle.save and throttle.answers == self.next_sequence:
            outputs.append(("learner", self._state(snapshot.encode(self.envs, self.transitions, self._step))))
        return outputs

    def _take(self, message: Message) -> list[Output]:
        return self._go_back(message) if isinstance(message, SimulatorState) else []

    def _go_back(self, state: SimulatorState) -> list[Output]:
        """Lock-step: be where a state was saved, and say so; then what was said of the Step there is said again."""
        if (state.incarnation, state.answers) != (self.incarnation, self.next_sequence):
            self.transitions, self._step, reasons = snapshot.restore(state.payload, self.envs)
            self.incarnation, self._action, self._use = state.incarnation, None, None
            self._kept = deque([self._step] if self._step else [])
            self._answered = self._allowed = 0
            self._throttled = False
            self.counters["episodes_not_restored"] += len(reasons)
            if reasons:
                log.warning("not as before: %d robots begin a new episode; %s", len(reasons), reasons[0])
        outputs: list[Output] = [("learner", self._state(b""))]
        return outputs + [(link, self._step) for link in ("learner", "policy") if self._step]

    def _state(self, payload: bytes) -> SimulatorState:
        return SimulatorState(self.source, self.incarnation, self.next_sequence, payload)
