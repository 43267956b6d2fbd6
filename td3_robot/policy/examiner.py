"""New policies are looked at beside the control loop, by a thread of its own: no robot waits for that.

To hash, check and rearrange the weights of a usual actor takes a millisecond, those of a large one tens of them. The
core stays what it is: it is told of a policy one or some turns later, and finds the result there when it asks for it.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from td3_robot import realtime
from td3_robot.errors import BundleError
from td3_robot.messages import Command, Message, Weights
from td3_robot.policy.store import Examine, Examined, examine
from td3_robot.transport.session import Input, Origin

_MOST = 4  # policies of one origin that wait
Key = tuple[int, str, bytes]
"""Version, hash and bytes."""


@dataclass(eq=False)
class _Held:
    """An input that is not told yet.

    Attributes:
        key: the policy in it that is looked at; None for none.
        done: whether nothing is left to be done before it is told.
        result: of the look, None if there was none.
    """

    origin: Origin
    message: Message
    key: Key | None = None
    done: bool = True
    begun: bool = False
    result: Examined | BundleError | None = None


class Examiner:
    """Holds inputs with policies back until they are looked at, and what came behind them from the same origin.

    It is to be given to a core as its ``examine``, and answers it at once; what it does not know, which costs only
    time, it looks at itself. Everything but the work itself is for one thread, the core's.

    Args:
        examine: does the work.

    Attributes:
        counters: policies of learners that were never looked at because newer ones waited too.
    """

    def __init__(self, examine: Examine = examine) -> None:
        self.counters: Counter[str] = Counter()
        self._examine = examine
        self._held: deque[_Held] = deque()  # as they came
        self._known: list[_Held] = []  # told in this turn
        self._work: queue.SimpleQueue[_Held | None] = queue.SimpleQueue()
        threading.Thread(target=self._look, daemon=True, name="examiner").start()

    def __call__(self, version: int, digest: str, payload: bytes) -> Examined:
        """What is known of these bytes, or found out now.

        Raises:
            BundleError: they are no policy, see :func:`~td3_robot.policy.store.examine`.
        """
        for held in self._known:
            if held.key and held.key[2] is payload and held.key[:2] == (version, digest):
                if isinstance(held.result, BundleError):
                    raise held.result
                if held.result:
                    return held.result
        return self._examine(version, digest, payload)

    def sift(self, inputs: list[Input], wanted: Callable[[Message], Key | None]) -> list[Input]:
        """What a core is to be told in this turn, given what arrived; once a turn.

        Of one origin everything is told in the order in which it came, but for an emergency stop, which waits for
        nothing.

        Args:
            inputs: what arrived.
            wanted: the policy in a message that the core would look at now; None for none.
        """
        self._known.clear()
        if not self._held and not any(isinstance(message, (Weights, Command)) for _, message in inputs):
            return inputs
        for origin, message in inputs:
            self._hold(_Held(origin, message, wanted(message)))
        told: list[Input] = []
        kept: deque[_Held] = deque()
        busy: set[Origin] = set()
        for held in self._held:
            if _urgent(held.message) or (held.done and held.origin not in busy):
                told.append((held.origin, held.message))
                self._known.append(held)
            else:
                kept.append(held)
                busy.add(held.origin)
        self._held = kept
        return told

    def close(self) -> None:
        """Let the thread end; what waits for it is never told."""
        self._work.put(None)

    def _hold(self, held: _Held) -> None:
        self._held.append(held)
        if held.key is None:
            return
        waiting = [other for other in self._held if other.key and not other.begun and other.origin == held.origin]
        if len(waiting) > _MOST:
            if isinstance(held.message, Command):  # a person waits for the Reply: the core looks at it itself
                return
            waiting[0].begun = True
            self._held.remove(waiting[0])
            self.counters["weights_overtaken"] += 1
        held.done = False
        self._work.put(held)

    def _look(self) -> None:
        realtime.stand_back()
        while held := self._work.get():
            if held.begun or not held.key:
                continue
            held.begun = True
            try:
                held.result = self._examine(*held.key)
            except BundleError as error:
                held.result = error
            except Exception:
                pass  # a mistake: the core, which is told of it next, makes it again, and says so
            held.done = True


def _urgent(message: Message) -> bool:
    return isinstance(message, Command) and message.verb == "estop"
