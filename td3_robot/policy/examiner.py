"""A learner's weights are looked at beside the control loop, by a thread of its own: no robot waits for that.

To hash, check and rearrange the weights of a usual actor takes a millisecond, those of a large one tens of them. The
core stays what it is: it is told of weights some turns later, and finds the result there when it asks for it. What a
person loads it looks at itself: of what people ask for, nothing may overtake anything.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable

from td3_robot import realtime
from td3_robot.errors import BundleError
from td3_robot.messages import Command, Weights
from td3_robot.policy.store import Examine, Examined, examine
from td3_robot.transport.session import Input, Origin

_MOST = 4  # weights that wait

Result = Examined | str | None
"""Of a look: a policy, what is wrong with it, or nothing, where the look itself failed."""


_Offer = tuple[Origin, Weights]


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
        self._told: tuple[Weights, Result] | None = None  # in this turn
        self._changed = threading.Condition()  # guards what follows
        self._waiting: list[_Offer] = []  # as they came
        self._now: _Offer | None = None  # is being looked at, or was
        self._result: Result = None
        self._done = self._overtaken = self._over = False
        threading.Thread(target=self._work, daemon=True, name="examiner").start()

    def __call__(self, version: int, digest: str, payload: bytes) -> Examined:
        """What is known of these bytes, or found out now.

        Raises:
            BundleError: they are no policy, see :func:`~td3_robot.policy.store.examine`.
        """
        if self._told and self._told[0].payload is payload:
            weights, result = self._told
            if isinstance(result, str) and (weights.version, weights.sha256) == (version, digest):
                raise BundleError(result)  # a new one: with a traceback it would hold itself, and the bytes
            if isinstance(result, Examined) and weights.sha256 == digest:
                return result
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
        arrived: list[_Offer] = []
        told: list[Input] = []
        loads = False
        for origin, message in inputs:
            if isinstance(message, Weights) and wanted(message):
                arrived.append((origin, message))
                continue
            told.append((origin, message))
            if isinstance(message, Command) and message.verb == "load":
                arrived, loads = self._left(arrived, []), True
        if not arrived and not self.busy:
            return told
        with self._changed:
            if loads:
                self._waiting, self._overtaken = self._left(self._waiting, []), self._now is not None
            waiting = [*self._waiting, *arrived]
            if self._now and self._done:
                if self._overtaken:
                    self._left([self._now], [])
                else:
                    told.insert(0, self._now)
                    self._told = self._now[1], self._result
                self._now, self._result, self._done, self._overtaken = None, None, False, False
            elif self._now is None:  # not in the turn in which the core is told: only after it, it knows what it wants
                waiting = self._left(waiting, [item for item in waiting if wanted(item[1])])
                self._now = waiting.pop() if waiting else None
                self._changed.notify()
            self._waiting = self._left(waiting, waiting[-_MOST:])
        return told

    def _left(self, waiting: list[_Offer], kept: list[_Offer]) -> list[_Offer]:
        """Those that are kept; the others are counted."""
        if skipped := len(waiting) - len(kept):
            self._counters["weights_not_examined"] += skipped
        return kept

    def close(self) -> None:
        """Let the thread end; what waits for it is never told."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # it may be forbidden; then both are as urgent
            realtime.stand_back()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or (self._now and not self._done))
                if self._over or not self._now:
                    return
                weights = self._now[1]
            result = self._look(weights)
            del weights
            with self._changed:
                self._result, self._done = result, True
            del result

    def _look(self, weights: Weights) -> Result:
        try:
            return self._examine(weights.version, weights.sha256, weights.payload)
        except BundleError as error:
            return str(error)
        except BaseException:  # a mistake: the core, which is told next, makes it again, and that is heard
            return None
