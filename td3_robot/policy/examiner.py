"""A thread that examines a learner's weights outside the control loop, so that no robot waits.

To hash, check and rearrange weights takes one millisecond for a usual actor, and tens of milliseconds for a large one.
The core gets the weights some turns later, with the result. Policies that a person loads are examined by the core
itself, because commands must keep their order.
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

_MOST = 4  # waiting weights

_Offer = tuple[Origin, Weights]


@dataclass(frozen=True, eq=False)
class _Look:
    """One examination. ``result`` yields a policy or an error text; it raises if the examination itself failed."""

    offer: _Offer
    result: Future[Examined | str]


class Examiner:
    """Holds weights back until they are examined. It starts with the newest; older ones follow if the core refuses it.

    The core calls this object as its ``examine`` and gets the finished result at once. Unknown bytes are examined in
    the calling thread.

    Args:
        counters: counts the weights that are never examined, because newer ones serve, a person has loaded a policy
            meanwhile, or too many wait.
        examine: examines bytes.
    """

    def __init__(self, counters: Counter[str], examine: Examine = examine) -> None:
        self._counters = counters
        self._examine = examine
        self._waiting: list[_Offer] = []  # in the order of arrival
        self._now: _Look | None = None
        self._told: _Look | None = None  # the examination that the core gets in this turn
        self._thread = ThreadPoolExecutor(1, "examiner")
        self._thread.submit(realtime.stand_back)  # now, so that the loop never waits for a starting thread

    def __call__(self, version: int, digest: str, payload: bytes) -> Examined:
        """The result for these bytes, known or new.

        Raises:
            BundleError: the bytes are no policy, see :func:`~td3_robot.policy.store.examine`.
        """
        if self._told and not self._told.result.exception():
            (_, weights), result = self._told.offer, self._told.result.result()
            if weights.payload is payload and weights.sha256 == digest:
                if isinstance(result, Examined):
                    return result
                if weights.version == version:
                    raise BundleError(result)
        # Also after an unexpected exception in the thread: the second attempt raises it here.
        return self._examine(version, digest, payload)

    @property
    def busy(self) -> bool:
        """Whether the core will soon get weights, even without further inputs."""
        return self._now is not None or bool(self._waiting)

    def sift(self, inputs: list[Input], wanted: Callable[[Weights], bool]) -> list[Input]:
        """The inputs for the core in this turn; called once a turn.

        Weights that the core wants pass after their examination. When a person loads a policy, all earlier weights are
        dropped, because the person's choice replaces them. All other inputs pass at once.

        Args:
            inputs: what arrived.
            wanted: whether the core would examine these weights now.
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
        # A load may change what the core wants, so no examination starts in the same turn.
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
        """End the thread. Waiting weights are lost."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Drop all weights that wait or are being examined."""
        if self._now:
            self._now.result.cancel()
            self._waiting.append(self._now.offer)
            self._now = None
        self._keep([])

    def _keep(self, kept: list[_Offer]) -> None:
        """Keep these waiting weights, and count the others."""
        if skipped := len(self._waiting) - len(kept):
            self._counters["weights_not_examined"] += skipped
            self._waiting = kept

    def _look(self, weights: Weights) -> Examined | str:
        try:
            return self._examine(weights.version, weights.sha256, weights.payload)
        except BundleError as error:
            return str(error)  # text only: the traceback of the error would keep the bytes alive
