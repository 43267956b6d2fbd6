"""Measures how regularly Steps arrive at a policy server, and whether the answers are in time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from td3_robot.core_types import Input, Peer
from td3_robot.messages import Step
from td3_robot.util.rate import WINDOW_S, LoopRate

log = logging.getLogger(__name__)


class AnswerRates:
    """Measures the rates of all sources that run in real time: drivers, and paced simulators.

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
        self._turn: tuple[Sequence[Input], float, float] = (), 0.0, 0.0

    def received(self, inputs: Sequence[Input], period: float, now: float) -> None:
        """Keep the inputs of a turn (one pass of the server's loop), which begins at ``now`` (s).

        ``period`` is the control period in seconds.
        """
        # Measure later, in answered(), so that the server can answer the Steps first.
        self._turn = inputs, period, now

    def answered(self, now: float, *, answers: bool = True) -> None:
        """Measure the answers to the Steps of this turn. The server has sent the answers at ``now`` (s).

        ``answers`` is False if the server answers no Steps, because it is unconfigured or has no policy. Then this
        method measures nothing.
        """
        (inputs, period, began), self._turn = self._turn, ((), 0.0, 0.0)
        if not answers:
            self._loops.clear()
            return
        steps: dict[str, int] = {}  # the number of Steps of each source in this turn
        for peer, message in inputs:
            if isinstance(message, Step) and isinstance(peer, Peer) and peer.role in self._roles:
                if peer.name not in self._loops:
                    self._loops[peer.name] = LoopRate(period)
                if not message.phase.any():  # all robots are at FIRST: before this Step there was a reset
                    self._loops[peer.name].pause()
                steps[peer.name] = steps.get(peer.name, 0) + 1
        for name, number in steps.items():
            loop = self._loops[name]
            loop.turn(began, missed=number - 1 + (now - began > loop.period), deadlines=number)
            loop.report(log, f"answers to {name}", self._allowed)

    def figures(self, now: float) -> dict[str, float]:
        """The figures of the source with the highest share of missed deadlines.

        The result is empty if there are no new measurements.
        """
        new = [loop.figures for loop in self._loops.values() if loop.figures and now - loop.measured < 3 * WINDOW_S]
        return max(new, key=lambda figures: (figures["missed_share"], figures["jitter_s"]), default={})
