"""Decides from the messages of the policy server whether a source may move its robots."""

from __future__ import annotations

from enum import Enum, auto

HOLD_OFF = 0.5
"""Seconds. If the policy server has sent no Welcome and is silent for this time, the driver makes its robots safe."""


class Contact(Enum):
    """The state of the contact, after an event:

    ================================================= ========
    event                                             state
    ================================================= ========
    a Welcome                                         WELCOMED
    a Heartbeat in place of a Welcome                 RIVAL
    a refusal because another driver has the name     RIVAL
    any other refusal                                 ALONE
    silence for HOLD_OFF in state RIVAL or ALONE      ALONE
    ================================================= ========
    """

    RIVAL = auto()  # the initial state: another driver of this name could be moving the robots
    ALONE = auto()  # no sign of another driver of this name, and no policy moves the robots
    WELCOMED = auto()


class ServerContact:
    """Tracks the contact with the policy server.

    A driver does not move its robots before the server welcomes it. The server sends no Welcome while another driver of
    the same name moves the robots. If the server is silent, nobody knows whether an earlier driver died during a
    movement. So this driver must make the robots safe. A simulator has no rivals and moves its robots at any time.

    Args:
        rivals: whether another process can move the same robots.
    """

    def __init__(self, *, rivals: bool) -> None:
        self.state = Contact.RIVAL
        self.rivals = rivals
        self._silent_since: float | None = None  # s; set again at each Heartbeat and after each HOLD_OFF of silence

    @property
    def welcomed(self) -> bool:
        return self.state is Contact.WELCOMED

    @property
    def may_move(self) -> bool:
        """Whether the source may observe and move its robots."""
        return self.welcomed or not self.rivals

    @property
    def in_charge(self) -> bool:
        """Whether this source is responsible for making its robots safe.

        If not, another driver is possibly responsible.
        """
        return self.state in (Contact.WELCOMED, Contact.ALONE) or not self.rivals

    @property
    def due(self) -> float | None:
        """The time (s) at which HOLD_OFF ends if the server stays silent; None before the first turn."""
        return None if self._silent_since is None else self._silent_since + HOLD_OFF

    def wait(self, now: float) -> None:
        """Record that the server has sent a Heartbeat, but no Welcome.

        Another driver of this name could be alive. The server still checks this.
        """
        self.state, self._silent_since = Contact.RIVAL, now

    def refused(self, *, rival: bool) -> None:
        """Record that the server has refused this source.

        Args:
            rival: whether the reason is another driver of the same name.
        """
        self.state = Contact.RIVAL if rival else Contact.ALONE

    def falls_silent(self, now: float) -> bool:
        """Whether HOLD_OFF has passed without a Heartbeat or a Welcome. If so, HOLD_OFF starts again."""
        if self._silent_since is None:
            self._silent_since = now
        if now < self._silent_since + HOLD_OFF:
            return False
        self.state, self._silent_since = Contact.ALONE, now
        return True
