"""The newest Step of a source and the Action that answers it."""

from __future__ import annotations

from enum import Enum, auto

from td3_robot.messages import Action, Step
from td3_robot.specs import Float32

_ASK_AGAIN = 1.0  # if no Action comes for this time (s), a source at full speed sends the Step again


class Progress(Enum):
    """The state of the exchange of one Step for one Action.

    From any state, a published Step leads to WAITING, an accepted Action leads to ANSWERED, and a refused observation
    leads to BLIND.
    """

    NOTHING = auto()  # the exchange has not begun: there is no observation yet
    WAITING = auto()  # for an Action
    ANSWERED = auto()
    BLIND = auto()  # there is no valid observation, so the source published no Step


class Exchange:
    """Holds the newest Step and its Action.

    Attributes:
        state: the state of the exchange.
        step: the newest published Step; None before the first.
        action: the accepted Action; None unless the state is ANSWERED.
        use: the numbers of the Action, clipped to the limits of the driver's ``Guard``. float32[N, A] for N robots with
            A action channels each; None if ``action`` is None.
    """

    def __init__(self) -> None:
        self.state = Progress.NOTHING
        self.step: Step | None = None
        self.action: Action | None = None
        self.use: Float32 | None = None
        self._sent_at = 0.0

    @property
    def may_step(self) -> bool:
        """Whether a source at full speed may step now: it has the Action, or the exchange has not begun."""
        return self.state in (Progress.NOTHING, Progress.ANSWERED)

    def replaces(self, action: Action) -> bool:
        """Whether to accept this Action. True for the first Action for the Step; a safe action replaces any Action."""
        return self.action is None or action.safe

    def accept(self, action: Action, use: Float32) -> None:
        """Take the Action. ``use``: the numbers of the Action, clipped to the limits of the driver's ``Guard``."""
        self.state, self.action, self.use = Progress.ANSWERED, action, use

    def publish(self, step: Step, now: float) -> None:
        """Make this the newest Step, which waits for its Action."""
        self.rewind(step)
        self._sent_at = now

    def lose_sight(self) -> None:
        """Record that there is no observation to publish."""
        self.state, self.action, self.use = Progress.BLIND, None, None

    def rewind(self, step: Step | None) -> None:
        """Return to this Step, without its Action. If ``step`` is None, return to the state before the first Step."""
        self.state = Progress.WAITING if step else Progress.NOTHING
        self.step, self.action, self.use = step, None, None

    def ask_again(self, now: float) -> bool:
        """Whether to send the Step again, because its Action is late. If so, the wait for the Action restarts."""
        if self.state is not Progress.WAITING or now - self._sent_at <= _ASK_AGAIN:
            return False
        self._sent_at = now
        return True
