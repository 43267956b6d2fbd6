"""Records the inputs of a core, and the outputs that ``step`` does not return. The core itself records nothing.

The outputs of a core depend only on its construction arguments, its turns and, for a driver, what its robot observes
and reports. To replay a core bit for bit, it is enough to record the messages on links and the messages in this table.
For the core of a policy server, replay also needs each policy that the server received. The recording holds the
policy, or the replayed learner computes the policy again.

=============== =====================================================================================================
Start           construction arguments, and state restored from disk; the node records one Start
Turn            the inputs and the time of one call of ``step``
RobotReport     what a driver's core learns from the robot, besides the content of Steps: the robot's problem, the
                reason for an emergency stop, and why no episode began: the reset continues, or the robot gave no
                valid first observation
MotorCommand    the action that the robot's motors get: an output of a driver's core
Latches         a new ``safety_state`` of a policy server's core; the server's state file also holds it
LifecycleChange the new state of a policy server, of a robot, or of the server's watch over a robot; the server records
                this message only if no operator gets the message
Weights         a policy that a person chose; the node records it
=============== =====================================================================================================

The transport records the bytes of the messages that it sends on links. It also records the bytes of the Commands and
Teleops that it receives from operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from td3_robot.core_types import Core, Input, Origin, Output
from td3_robot.messages import Latches, Message, MotorCommand, RobotReport
from td3_robot.safety.state import SafetyState
from td3_robot.specs import Float32
from td3_robot.topics import RECORDER

if TYPE_CHECKING:
    from td3_robot.policy.core import PolicyCore

RESETTING = 2
"""``refused`` of a RobotReport while the reset of a robot continues."""
_LONGEST = 4096  # characters of a problem or a stop reason; the rest is not recorded

Observer = Callable[[Sequence[Output], float], Iterable[Message]]
"""Called after a turn, with the outputs and time (s) of the turn. Returns further messages to record."""


class Sink(Protocol):
    """Takes the records.

    A node uses its bus as the sink. Replay, tests and a benchmark use an object that collects the records.
    """

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        """Record the inputs of the turn at ``now`` (s)."""

    def send(self, to: Origin, message: Message) -> bool:
        """Record a message; ``to`` is ``RECORDER``."""


class RecordedCore:
    """A core that records each of its turns.

    Args:
        observer: returns the messages that ``step`` does not return; None for a core without such messages.
    """

    def __init__(self, core: Core, sink: Sink, observer: Observer | None = None) -> None:
        self._core = core
        self._sink = sink
        self._observer = observer

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        self._sink.record_turn(now, inputs)
        outputs = self._core.step(inputs, now)
        if self._observer:
            for message in self._observer(outputs, now):
                self._sink.send(RECORDER, message)
        return outputs


class PolicyObserver:
    """An observer of a policy server's core. Returns new safety states, and LifecycleChanges that go to no operator."""

    def __init__(self, core: PolicyCore) -> None:
        self._core = core
        self._state = SafetyState()

    def __call__(self, outputs: Sequence[Output], now: float) -> list[Message]:
        del now
        facts: list[Message] = []
        if self._core.changes:
            sent = {id(message) for _, message in outputs}
            facts += [change for change in self._core.changes if id(change) not in sent]
        state = self._core.safety_state
        if state is not self._state and state != self._state:  # the check of identity is faster, so it comes first
            facts.append(Latches(state.plain()))
        self._state = state
        return facts


class RecordedBody:
    """Wraps a driver's robot, and notes MotorCommands and RobotReports. :meth:`observe` returns these messages.

    :meth:`observe` is an :data:`Observer`.

    Args:
        body: a ``td3_robot.driver.body.Body``. The wrapper has all attributes of this body.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        self._actions: list[Float32] = []
        self._reports: list[RobotReport] = []
        self._newest = (0, "", "", 0)  # the newest report: refused, problem, stop reason and unprepared
        self._calls = 0
        self._next_step = 0
        self._stepped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    @property
    def stop(self) -> str:
        """Why the robot asks for an emergency stop. The core clears this text.

        The text is empty if the robot does not ask for an emergency stop.
        """
        return str(self._body.stop)

    @stop.setter
    def stop(self, reason: str) -> None:
        self._body.stop = reason

    def command(self, action: Float32) -> None:
        """Pass an action, float32[1, A], to the robot."""
        self._body.command(action)
        self._actions.append(action[0].copy())
        refused = self._newest[0]
        self._note_report(0 if refused == RESETTING and not self._body.resetting else refused)

    def step(self, action: Float32, may_reset: bool = True) -> int | None:
        """End a control period. Returns None if no Step follows."""
        made: int | None = self._body.step(action, may_reset)
        self._stepped = made is not None
        self._note_report(RESETTING if self._body.resetting else int(made is None))
        return made

    def observe(self, outputs: Sequence[Output], now: float) -> list[Message]:
        """Return the actions and reports since the last call."""
        del outputs
        actions = [MotorCommand(self._next_step, int(now * 1e9), action) for action in self._actions]
        facts: list[Message] = [*actions, *self._reports]
        self._next_step += self._stepped
        self._stepped = False
        self._actions, self._reports = [], []
        return facts

    def _note_report(self, refused: int) -> None:
        self._calls += 1
        report = refused, self._body.problem[:_LONGEST], self._body.stop[:_LONGEST], int(not self._body.prepared)
        if report != self._newest:
            self._newest = report
            self._reports.append(RobotReport(self._calls, *report))
