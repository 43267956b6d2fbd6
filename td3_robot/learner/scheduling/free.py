"""Free-running: learner and simulators wait for each other only to keep the replay ratio."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from td3_robot.core_types import Output, Peer
from td3_robot.learner.scheduling.base import Scheduler
from td3_robot.learner.sources import UNLIMITED, Source, throttles
from td3_robot.messages import Step

if TYPE_CHECKING:
    from td3_robot.learner.core import LearnerCore

log = logging.getLogger(__name__)

_PORTION = 100  # a robot gets at most this many steps in advance, so that steps remain for sources that join later
# The smallest grant, as a fraction of min(``replay_ratio_band``, ``_PORTION`` · number of robots of the source). The
# exception: a source with at most one step left for each robot also gets smaller grants.
_WORTH_A_MESSAGE = 0.25
_START_TIME = 10.0  # seconds after the first join; usually all simulators of a run have joined by then


class FreeRunning(Scheduler):
    """Stores Steps on arrival, makes at most one update per :meth:`learn`, and grants steps within the replay ratio.

    Attributes:
        equal_shares: whether the sources get equal shares of the steps. The replay of a recording from version 0.1.0
            sets this attribute to false.
    """

    equal_shares = True

    def __init__(self, core: LearnerCore) -> None:
        super().__init__(core)
        self._first_joined_at = 0.0

    def policy_joined(self, peer: Peer) -> list[Output]:
        core, publisher, held = self.core, self.core.publisher, peer.hello.weights_version
        if held < max(1, publisher.version):
            return [(peer, weights) for weights in publisher.sent]
        # The server may have weights of an earlier learner process. The new weights need a higher version.
        if not core.env_steps and not core.updates and core.config.learner.start_from is None:
            log.warning(
                "policy server %s: the learner replaces version %d with untrained weights; "
                "to train an existing policy further, set learner.start_from",
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

    def source_joined(self, source: Source) -> list[Output]:
        now, others = source.active_at, [other.share for other in self.core.sources.live() if other is not source]
        if not others:
            self._first_joined_at = now
        source.share = 0 if now - self._first_joined_at < _START_TIME else min(others)
        return []

    def grant(self, now: float) -> list[Output]:
        """Distribute the steps that the replay ratio allows, first to the sources with the smallest share.

        The share of a source counts the steps that the learner has granted to it. All sources that joined at the start
        get equal shares. During ``_START_TIME``, the learner reserves shares for the simulators of the run that have
        not joined yet. A source that joins later, or that sent no Steps for a while, gets an equal share from then on
        (start-time fair queueing, Goyal et al. 1996).

        A source that gets no new steps also gets a Throttle from time to time. The Throttle says which Steps the
        learner has processed, so that the source can delete them.
        """
        learning, limiter = self.core.learning, self.core.learning.limiter
        connected = self.core.sources.live()
        live: list[Source] = []
        silent: list[Source] = []
        for source in connected:
            (silent if source.stalled(now) else live).append(source)
        if limiter.ratio is None and learning.updates >= limiter.offline:
            waiting = [source for source in live if source.granted < UNLIMITED or source.unacknowledged]
            for source in waiting:
                source.granted = UNLIMITED
            return throttles(waiting)
        overshoot = sum(source.robots - 1 for source in live)
        free = limiter.steps_allowed(learning.updates, overshoot) - learning.env_steps
        free -= sum(source.outstanding for source in live)
        granted = self._distribute(free, live, len(connected), now) if live and free > 0 else []
        for source in silent:
            source.share = max(source.share, min((other.share for other in live), default=0))
        told = {*granted}
        return throttles(granted + [source for source in live if source.unacknowledged and source not in told])

    def _distribute(self, free: int, live: list[Source], connected: int, now: float) -> list[Source]:
        """Grant up to ``free`` steps to the sources with the smallest shares. Returns the sources that got a grant."""
        if not self.equal_shares:
            return self._distribute_by_need(free, live, now)
        starting = now - self._first_joined_at < _START_TIME
        missing = max(0, self.core.config.simulators - connected) if starting else 0
        room = {source.name: max(0, _PORTION * source.robots - source.outstanding) for source in live}
        steps = _equalize({source.name: source.share for source in live}, room, free, missing)
        granted = []
        for source in live:
            running_dry = source.outstanding <= source.robots
            worth = min(self.core.learning.limiter.band, _PORTION * source.robots) * _WORTH_A_MESSAGE
            if steps[source.name] >= (1 if running_dry else worth):
                source.grant(steps[source.name], now)
                granted.append(source)
        return granted

    def _distribute_by_need(self, free: int, live: list[Source], now: float) -> list[Source]:
        """Grant the steps as version 0.1.0 did: first to the sources with the fewest unused steps."""
        granted = []
        for before, source in enumerate(sorted(live, key=lambda item: item.outstanding)):
            part = -(-free // (len(live) - before))
            running_dry = source.outstanding <= source.robots
            if part > 0 and (running_dry or part >= self.core.learning.limiter.band * _WORTH_A_MESSAGE):
                source.grant(part, now)
                free -= part
                granted.append(source)
        return granted


def _equalize(shares: Mapping[str, int], room: Mapping[str, int], free: int, missing: int) -> dict[str, int]:
    """Distribute ``free`` steps so that the shares become as equal as possible.

    Args:
        shares: share of each source before the distribution.
        room: the largest number of steps that each source can get.
        missing: number of sources that have not joined yet. Their share is 0, and this function reserves their steps.
    """
    rows = [(0, free)] * missing + [(shares[name], room[name]) for name in shares]

    def raised(share: int, most: int, level: int) -> int:
        return min(max(0, level - share), most)

    full = _level(rows, free)
    steps = {name: raised(shares[name], room[name], full - 1) for name in shares}
    left = free - sum(raised(*row, full - 1) for row in rows)
    for name in shares:  # each source gets at most one of the remaining steps
        if left > 0 and raised(shares[name], room[name], full) > steps[name]:
            steps[name] += 1
            left -= 1
    return steps


def _level(rows: Sequence[tuple[int, int]], free: int) -> int:
    """Return the lowest level at which all rows together take at least ``free`` steps.

    A level is one target for all shares. At a level, a row (share, room) takes level - share steps, but at least 0 and
    at most ``room``. If all rows together have too little room, the result is the lowest level at which every row takes
    its whole room.
    """
    level = used = rising = 0
    for at, change in sorted([(share, 1) for share, _ in rows] + [(share + room, -1) for share, room in rows]):
        if rising and used + rising * (at - level) >= free:
            return level - (used - free) // rising
        used += rising * (at - level)
        level, rising = at, rising + change
    return level
