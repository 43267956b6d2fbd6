"""Records the inputs of a core, and the results that ``step`` does not return. The core knows no recorder.

The outputs of a core depend only on its construction arguments, its turns and, for a driver, the reports of its robot.
These messages suffice to replay a core bit for bit:

=============== =====================================================================================================
Start           construction arguments, and state restored from disk; the node records it once
Turn            the inputs and the time of one call of ``step``
Heard           what the robot reports besides its Steps: an input of a driver's core
Told            the action that the robot's motors get: an output of a driver's core
InForce         ``safety_state`` of a policy server's core after a turn; the state file of the server holds it, too
=============== =====================================================================================================

All other outputs are messages on links. The transport records them with the bytes that it sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from td3_robot.core_types import Core, Input, Origin, Output
from td3_robot.messages import Heard, InForce, LifecycleChange, Message, Told
from td3_robot.safety.state import SafetyState
from td3_robot.specs import Float32
from td3_robot.topics import RECORDER

_LONGEST = 4096  # the most characters that are recorded of a problem or a stop reason


class Sink(Protocol):
    """Takes the records: the bus of a transport, or a list in replay and tests."""

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        """Record the inputs of the turn at ``now`` (s)."""

    def send(self, to: Origin, message: Message) -> bool:
        """Record a message; ``to`` is ``RECORDER``."""


class Observer(Protocol):
    """Finds the messages of a turn that are neither inputs nor outputs of ``step``."""

    def before(self, now: float) -> None:
        """The turn at ``now`` (s) begins."""

    def after(self, outputs: Sequence[Output]) -> Iterable[Message]:
        """The turn has ended with these outputs. Returns the other messages to record."""


class RecordedCore:
    """A core that records each of its turns.

    Args:
        core: the core to drive.
        sink: takes the records.
        observer: finds the messages that ``step`` does not return; None if there are none.
    """

    def __init__(self, core: Core, sink: Sink, observer: Observer | None = None) -> None:
        self._core = core
        self._sink = sink
        self._observer = observer

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Record the inputs, run the core's turn at ``now`` (s), and record the messages of the observer."""
        self._sink.record_turn(now, inputs)
        if self._observer is None:
            return self._core.step(inputs, now)
        self._observer.before(now)
        outputs = self._core.step(inputs, now)
        for message in self._observer.after(outputs):
            self._sink.send(RECORDER, message)
        return outputs


class PolicyState(Protocol):
    """What a policy server's core shows after a turn.

    Attributes:
        safety_state: the current safety state. The core makes a new object when the state may have changed.
        changes: the changes of the lifecycle state in the newest turn.
    """

    safety_state: SafetyState
    changes: list[LifecycleChange]


class PolicyObserver:
    """Records each change of a policy server's safety state, and the LifecycleChanges that the server did not send."""

    def __init__(self, core: PolicyState) -> None:
        self._core = core
        self._state = SafetyState()

    def before(self, now: float) -> None:
        """Does nothing: the facts exist only after the turn."""

    def after(self, outputs: Sequence[Output]) -> list[Message]:
        facts: list[Message] = []
        if self._core.changes:
            sent = {id(message) for _, message in outputs}
            facts += [change for change in self._core.changes if id(change) not in sent]
        state = self._core.safety_state
        if state is not self._state:
            if state != self._state:
                facts.append(InForce(state.plain()))
            self._state = state
        return facts


class RecordedBody:
    """Wraps a driver's robot and records its calls. It serves as the robot of the core and as the core's observer.

    Args:
        body: the robot, as ``td3_robot.driver.body.Body``; this object has all its attributes.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        self._facts: list[Message] = []
        self._heard = Heard(0, 0, "", "")
        self._calls = 0
        self._next_step = 0
        self._stepped = False
        self._now = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    @property
    def stop(self) -> str:
        """Why everything has to stop. Empty if nothing has to; the core clears it."""
        return str(self._body.stop)

    @stop.setter
    def stop(self, reason: str) -> None:
        self._body.stop = reason

    def command(self, action: Float32) -> None:
        """Pass on and record an action, float32[1, A]."""
        self._body.command(action)
        self._facts.append(Told(self._next_step, int(self._now * 1e9), action[0].copy()))
        self._listen(self._heard.refused)

    def step(self, action: Float32) -> int | None:
        """End a control period. If the result is None, no Step follows."""
        made: int | None = self._body.step(action)
        self._stepped = made is not None
        self._listen(int(made is None))
        return made

    def before(self, now: float) -> None:
        self._now = now

    def after(self, outputs: Sequence[Output]) -> list[Message]:
        del outputs
        self._next_step += self._stepped
        self._stepped = False
        facts, self._facts = self._facts, []
        return facts

    def _listen(self, refused: int) -> None:
        """Record the robot's report after a call if it differs from the report before."""
        self._calls += 1
        heard = Heard(self._calls, refused, self._body.problem[:_LONGEST], self._body.stop[:_LONGEST])
        before = self._heard
        if (heard.refused, heard.trouble, heard.stop) != (before.refused, before.trouble, before.stop):
            self._heard = heard
            self._facts.append(heard)
