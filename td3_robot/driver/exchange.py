"""The newest Step of a source and the Action that answers it."""

from __future__ import annotations

from enum import Enum, auto

from td3_robot.messages import Action, Step
from td3_robot.specs import Float32

_ASK_AGAIN = 1.0  # seconds without an Action after which the Step is sent to the policy server once more


class Progress(Enum):
    """How far the exchange of one Step for one Action is.

    A published Step leads to WAITING, an accepted Action to ANSWERED, a refused observation to BLIND, from any state.
    """

    NOTHING = auto()  # no Step is published yet
    WAITING = auto()  # for an Action
    ANSWERED = auto()
    BLIND = auto()  # the newest observation was refused: no Action can answer what nobody saw


class Exchange:
    """Holds the newest Step and its Action.

    Attributes:
        state: how far the exchange is.
        step: the newest published Step; None before the first.
        action: the accepted Action; None unless the state is ANSWERED.
        use: float32[N, A], what the guard lets through of the Action; None where ``action`` is None.
    """

    def __init__(self) -> None:
        self.state = Progress.NOTHING
        self.step: Step | None = None
        self.action: Action | None = None
        self.use: Float32 | None = None
        self._asked = 0.0

    @property
    def may_step(self) -> bool:
        """Whether the next step may come at full speed: an Action is there, or no Step has asked for one."""
        return self.state in (Progress.NOTHING, Progress.ANSWERED)

    def replaces(self, action: Action) -> bool:
        """Whether this Action is the first, or the safe action of the server, which replaces another one."""
        return self.action is None or action.weights_version == 0

    def accept(self, action: Action, use: Float32) -> None:
        """The Action has come, and the guard lets ``use``, float32[N, A], through."""
        self.state, self.action, self.use = Progress.ANSWERED, action, use

    def publish(self, step: Step, now: float) -> None:
        """A new Step goes out, and waits for its Action."""
        self.rewind(step)
        self._asked = now

    def lose_sight(self) -> None:
        """There is no observation to publish."""
        self.state, self.action, self.use = Progress.BLIND, None, None

    def rewind(self, step: Step | None) -> None:
        """Go back to the time when this Step was the newest and its Action had not come yet."""
        self.state = Progress.WAITING if step else Progress.NOTHING
        self.step, self.action, self.use = step, None, None

    def ask_again(self, now: float) -> bool:
        """Whether to send the Step again, because no answer has come for too long. If so, it counts as sent now."""
        if self.state is not Progress.WAITING or now - self._asked <= _ASK_AGAIN:
            return False
        self._asked = now
        return True
