"""A thread that examines a learner's weights outside the control loop, so that no robot waits for the examination.

Hashing, checking and rearranging weights takes one millisecond for a usual actor, and tens of milliseconds for a large
actor. The core gets the weights and the result some turns (calls of ``step``) later. If a person loads a policy, the
core itself examines the policy, because the core must execute commands in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from td3_robot.core_types import Input, Origin
from td3_robot.errors import BundleError
from td3_robot.messages import Command, Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.store import Examine, examine
from td3_robot.runtime import realtime

_MOST = 4  # highest number of waiting weights

_Offer = tuple[Origin, Weights]


@dataclass(frozen=True, eq=False)
class _Examination:
    """One examination.

    ``result`` holds the actor, or the text of the BundleError if the bytes are not a policy. If the examination
    ends with another exception, ``result.result()`` raises this exception.
    """

    offer: _Offer
    result: Future[Actor | str]


class Examiner:
    """Holds weights back until its thread has examined them. The thread takes the newest weights first.

    This object is the core's function ``examine``. If the thread has examined the bytes, the call returns the result at
    once. Otherwise the call examines the bytes itself.

    Args:
        counters: ``weights_not_examined`` counts the weights that the examiner drops. The examiner drops weights that
            the core would refuse, for example because the core has newer weights. The examiner also drops weights if a
            person has loaded a policy, or if too many weights wait.
    """

    def __init__(self, counters: Counter[str], examine: Examine = examine) -> None:
        self._counters = counters
        self._examine = examine
        self._waiting: list[_Offer] = []  # in the order of arrival
        self._current: _Examination | None = None
        self._delivered: _Examination | None = None  # its weights go to the core in this turn
        self._thread = ThreadPoolExecutor(1, "examiner")
        self._thread.submit(realtime.stand_back)  # starts the thread now, not later in the control loop

    def __call__(self, version: int, digest: str, payload: bytes) -> Actor:
        """Return the actor of the policy in these bytes. Raises BundleError if they are not a policy."""
        if self._delivered and not self._delivered.result.exception():
            (_, weights), result = self._delivered.offer, self._delivered.result.result()
            if weights.payload is payload and weights.sha256 == digest:
                if isinstance(result, Actor):
                    return result
                if weights.version == version:
                    raise BundleError(result)
        # If the thread failed with an unexpected exception, this second examination raises the exception here.
        return self._examine(version, digest, payload)

    @property
    def busy(self) -> bool:
        """Whether the core will soon get weights, even without further inputs."""
        return self._current is not None or bool(self._waiting)

    def sift(self, inputs: list[Input], wanted: Callable[[Weights], bool]) -> list[Input]:
        """Return the inputs that the core gets in this turn. Call this method once in each turn.

        Weights that the core wants come after their examination. All other inputs come immediately. When a person
        loads a policy, this method drops all earlier weights, because the person's choice replaces them.
        ``wanted`` returns whether the core would examine these weights now.
        """
        self._delivered = None
        passed: list[Input] = []
        loads = False
        for origin, message in inputs:
            if isinstance(message, Weights) and wanted(message):
                self._waiting.append((origin, message))
                continue
            passed.append((origin, message))
            if isinstance(message, Command) and message.verb == "load":
                self._forget()
                loads = True
        # A load may change which weights the core wants, so no examination starts in the same turn.
        if self._current and self._current.result.done():
            passed.insert(0, self._current.offer)
            self._delivered, self._current = self._current, None
        elif self._waiting and not self._current and not loads:
            self._keep([offer for offer in self._waiting if wanted(offer[1])])
            if self._waiting:
                offer = self._waiting.pop()
                self._current = _Examination(offer, self._thread.submit(self._examined, offer[1]))
        self._keep(self._waiting[-_MOST:])
        return passed

    def close(self) -> None:
        """End the thread. Waiting weights are lost."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Drop all weights that wait or are being examined."""
        if self._current:
            self._current.result.cancel()
            self._waiting.append(self._current.offer)
            self._current = None
        self._keep([])

    def _keep(self, kept: list[_Offer]) -> None:
        """Keep these waiting weights. Drop and count the others."""
        if skipped := len(self._waiting) - len(kept):
            self._counters["weights_not_examined"] += skipped
            self._waiting = kept

    def _examined(self, weights: Weights) -> Actor | str:
        try:
            return self._examine(weights.version, weights.sha256, weights.payload)
        except BundleError as error:
            return str(error)  # text only: the traceback of the error would keep the bytes in memory
