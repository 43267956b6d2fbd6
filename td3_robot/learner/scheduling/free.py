"""Free-running: every process runs at full speed, as far as the replay ratio allows."""

from __future__ import annotations

import logging

from td3_robot.core_types import Output, Peer
from td3_robot.learner.scheduling.base import Scheduler
from td3_robot.learner.sources import UNLIMITED, Source, throttles
from td3_robot.messages import Step

log = logging.getLogger(__name__)

_WORTH_A_MESSAGE = 0.25  # fraction of the band: a source with steps left gets no smaller grant


class FreeRunning(Scheduler):
    """Stores each Step on arrival, makes at most one update per turn, and grants steps within the replay ratio."""

    def policy_joined(self, peer: Peer) -> list[Output]:
        core, publisher, held = self.core, self.core.publisher, peer.hello.weights_version
        if held < max(1, publisher.version):
            return [(peer, weights) for weights in publisher.sent]
        # The server has weights of an earlier learner process. New versions must be higher.
        if not core.env_steps and core.config.learner.start_from is None:
            log.warning(
                "policy server %s: the learner replaces version %d with untrained weights; "
                "to begin with a policy, set learner.start_from",
                peer.name,
                held,
            )
        publisher.version = held
        return publisher.publish() if core.spec else []

    def step_arrived(self, source: Source, step: Step, now: float) -> None:
        self.core.insert(source, step, now)

    @property
    def busy(self) -> bool:
        return not self.core.done and self.core.learning.update_due

    def learn(self, now: float) -> list[Output]:
        del now
        if self.busy:
            self.core.learning.update()
        return self.core.publisher.publish_if_due()

    def restarted(self) -> None:
        self.core.publisher.publish()

    def grant(self, now: float) -> list[Output]:
        """Distribute the steps that the replay ratio allows, first to the sources with the fewest steps left.

        A source without new steps also gets a Throttle from time to time. The Throttle names the newest Step that the
        learner has processed, so that the source can delete the processed Steps.
        """
        learning, limiter = self.core.learning, self.core.learning.limiter
        live = [source for source in self.core.sources.live() if not source.stalled(now)]
        if limiter.ratio is None and learning.updates >= limiter.offline:
            waiting = [source for source in live if source.granted < UNLIMITED or source.unacknowledged]
            for source in waiting:
                source.granted = UNLIMITED
            return throttles(waiting)
        overshoot = sum(source.robots - 1 for source in live)
        free = limiter.steps_allowed(learning.updates, overshoot) - learning.env_steps
        free -= sum(source.outstanding for source in live)
        granted: list[Source] = []
        for before, source in enumerate(sorted(live, key=lambda item: item.outstanding)):
            share = -(-free // (len(live) - before)) if free > 0 else 0
            running_dry = source.outstanding <= source.robots
            if share > 0 and (running_dry or share >= limiter.band * _WORTH_A_MESSAGE):
                source.grant(share, now)
                free -= share
                granted.append(source)
        return throttles(granted + [source for source in live if source.unacknowledged and source not in granted])
