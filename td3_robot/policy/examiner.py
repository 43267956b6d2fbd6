"""A learner's weights are looked at beside the control loop, by a thread of its own: no robot waits for that.

To hash, check and rearrange the weights of a usual actor takes a millisecond, those of a large one tens of them. The
core stays what it is: it is told of weights some turns later, and finds the result there when it asks for it. What a
person loads it looks at itself: of what people ask for, nothing may overtake anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from td3_robot.core_types import Input, Origin
from td3_robot.errors import BundleError
from td3_robot.messages import Command, Weights
from td3_robot.policy.store import Examine, Examined, examine
from td3_robot.runtime import realtime

_MOST = 4  # weights that wait

_Offer = tuple[Origin, Weights]


@dataclass(frozen=True, eq=False)
class _Look:
    """``result`` is a policy, or what is wrong with it; an exception where the look itself failed."""

    offer: _Offer
    result: Future[Examined | str]


class Examiner:
    """Holds weights back until they are looked at: the newest first, older ones only if the core does not take it.

    It is to be given to a core as its ``examine``, and knows the answer at once then; of what it was not asked to look
    at before, it finds it out in the asking thread. Only the look itself happens in its own.

    Args:
        counters: where weights are counted that nobody looks at, because newer ones serve, a person has loaded others
            meanwhile, or there are too many.
        examine: does the work.
    """

    def __init__(self, counters: Counter[str], examine: Examine = examine) -> None:
        self._counters = counters
        self._examine = examine
        self._waiting: list[_Offer] = []  # as they came
        self._now: _Look | None = None
        self._told: _Look | None = None  # what the core was told of in this turn
        self._thread = ThreadPoolExecutor(1, "examiner")
        self._thread.submit(realtime.stand_back)  # now: the loop must not wait for a thread to start, either

    def __call__(self, version: int, digest: str, payload: bytes) -> Examined:
        """What is known of these bytes, or found out now.

        Raises:
            BundleError: they are no policy, see :func:`~td3_robot.policy.store.examine`.
        """
        if self._told and not self._told.result.exception():
            (_, weights), result = self._told.offer, self._told.result.result()
            if weights.payload is payload and weights.sha256 == digest:
                if isinstance(result, Examined):
                    return result
                if weights.version == version:
                    raise BundleError(result)
        # Where the look failed by a mistake, it is made again, and heard of.
        return self._examine(version, digest, payload)

    @property
    def busy(self) -> bool:
        """Whether there will soon be something to be told, though nothing arrives."""
        return self._now is not None or bool(self._waiting)

    def sift(self, inputs: list[Input], wanted: Callable[[Weights], bool]) -> list[Input]:
        """What a core is to be told in this turn, given what arrived; once a turn.

        Everything at once, but weights that the core would look at: they when they were looked at. Not at all those
        that came before a policy which a person loads: it was chosen over them.

        Args:
            inputs: what arrived.
            wanted: whether the core would look at weights now; what it would not is told at once.
        """
        self._told = None
        told: list[Input] = []
        loads = False
        for origin, message in inputs:
            if isinstance(message, Weights) and wanted(message):
                self._waiting.append((origin, message))
                continue
            told.append((origin, message))
            if isinstance(message, Command) and message.verb == "load":
                self._forget()
                loads = True
        # Nothing is begun in a turn that may change what the core wants.
        if self._now and self._now.result.done():
            told.insert(0, self._now.offer)
            self._told, self._now = self._now, None
        elif self._waiting and not self._now and not loads:
            self._keep([offer for offer in self._waiting if wanted(offer[1])])
            if self._waiting:
                offer = self._waiting.pop()
                self._now = _Look(offer, self._thread.submit(self._look, offer[1]))
        self._keep(self._waiting[-_MOST:])
        return told

    def close(self) -> None:
        """Let the thread end; what waits for it is never told."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Whatever was to be told."""
        if self._now:
            self._now.result.cancel()
            self._waiting.append(self._now.offer)
            self._now = None
        self._keep([])

    def _keep(self, kept: list[_Offer]) -> None:
        """Of those that wait, these; the others are counted."""
        if skipped := len(self._waiting) - len(kept):
            self._counters["weights_not_examined"] += skipped
            self._waiting = kept

    def _look(self, weights: Weights) -> Examined | str:
        try:
            return self._examine(weights.version, weights.sha256, weights.payload)
        except BundleError as error:
            return str(error)  # which holds nothing; the error has a traceback, and by it the bytes
