"""Measures how regularly Steps arrive at a policy server, and whether the answers are in time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from td3_robot.core_types import Input, Peer
from td3_robot.messages import Step
from td3_robot.util.rate import WINDOW_S, LoopRate

log = logging.getLogger(__name__)


class AnswerRates:
    """The rates of all sources in real time: drivers, and simulators that are paced.

    A source needs its answer within a control period. The server misses this deadline if it answers later, or if the
    next Step arrives before the answer.

    Args:
        allowed: the share of missed deadlines above which the server logs a warning, 0 to 1.
        realtime: whether simulators run in real time.
    """

    def __init__(self, allowed: float, *, realtime: bool) -> None:
        self._allowed = allowed
        self._roles = ("driver", "simulator") if realtime else ("driver",)
        self._loops: dict[str, LoopRate] = {}
        self._began = 0.0
        self._steps: Counter[str] = Counter()  # number of Steps of each source in this turn

    def received(self, inputs: Sequence[Input], period: float, now: float) -> None:
        """Note the Steps of a turn that begins at ``now`` (s); ``period``: the control period in seconds."""
        self._began = now
        for peer, message in inputs:
            if isinstance(message, Step) and isinstance(peer, Peer) and peer.role in self._roles:
                loop = self._loops.setdefault(peer.name, LoopRate(period))
                if not message.phase.any():  # all robots are at FIRST: before this Step there was a reset
                    loop.pause()
                self._steps[peer.name] += 1

    def answered(self, now: float) -> None:
        """Note that the server has answered the Steps of this turn at ``now`` (s)."""
        for name, steps in self._steps.items():
            loop = self._loops[name]
            missed = steps - 1 + (now - self._began > loop.period)
            loop.turn(self._began, missed=missed, deadlines=steps)
            loop.report(log, f"answers to {name}", self._allowed)
        self._steps.clear()

    def figures(self, now: float) -> dict[str, float]:
        """Return the figures of the source that misses the most answers; empty if no source was measured lately."""
        new = [loop.figures for loop in self._loops.values() if loop.figures and now - loop.measured < 3 * WINDOW_S]
        return max(new, key=lambda figures: (figures["missed_share"], figures["jitter_s"]), default={})
