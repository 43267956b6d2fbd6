"""Whether a source may move its robots: what it has heard from its policy server."""

from __future__ import annotations

from enum import Enum, auto

HOLD_OFF = 0.5
"""Seconds of silence after which a driver that the policy server has not welcomed makes its robots safe."""


class Contact(Enum):
    """What the policy server has said last. Every event leads to one state, whatever the state before:

    ================================================= ========
    event                                             state
    ================================================= ========
    a Welcome                                         WELCOMED
    a Heartbeat in place of a Welcome                 RIVAL
    a refusal because another driver has the name     RIVAL
    any other refusal                                 ALONE
    no word for HOLD_OFF in any state but WELCOMED    ALONE
    ================================================= ========
    """

    UNHEARD = auto()  # nothing yet
    RIVAL = auto()  # another driver of this name may move the robots
    ALONE = auto()  # no other driver moves the robots, and no policy does
    WELCOMED = auto()


class ServerContact:
    """Tracks the contact with the policy server.

    A driver leaves its robots alone until the server has welcomed it: the server does not while another driver of the
    same name moves them. A silent server may be dead, and the driver before may have died in a movement, so the robots
    must become safe. A simulator has no rivals and moves its robots at any time.

    Args:
        rivals: whether another process may move the same robots.

    Attributes:
        state: of the contact.
        rivals: as given.
    """

    def __init__(self, *, rivals: bool) -> None:
        self.state = Contact.UNHEARD
        self.rivals = rivals
        self._silent_since: float | None = None  # making the robots safe begins another silence

    @property
    def welcomed(self) -> bool:
        return self.state is Contact.WELCOMED

    @property
    def may_move(self) -> bool:
        """Whether the source may observe, reset and move its robots."""
        return self.welcomed or not self.rivals

    @property
    def in_charge(self) -> bool:
        """Whether the source has to make its robots safe."""
        return self.state in (Contact.WELCOMED, Contact.ALONE) or not self.rivals

    @property
    def due(self) -> float | None:
        """When the silence has lasted for HOLD_OFF, in seconds; None before the first turn."""
        return None if self._silent_since is None else self._silent_since + HOLD_OFF

    def welcome(self) -> None:
        """The server has welcomed this source."""
        self.state = Contact.WELCOMED

    def wait(self, now: float) -> None:
        """The server checks whether another driver of this name is alive; it may have welcomed that one meanwhile."""
        self.state, self._silent_since = Contact.RIVAL, now

    def refused(self, *, rival: bool) -> None:
        """The server has refused this source; ``rival``: because another driver has its name."""
        self.state = Contact.RIVAL if rival else Contact.ALONE

    def falls_silent(self, now: float) -> bool:
        """Whether a source without a Welcome has now heard nothing for HOLD_OFF; once for each HOLD_OFF."""
        if self._silent_since is None:
            self._silent_since = now
        if now < self._silent_since + HOLD_OFF:
            return False
        self.state, self._silent_since = Contact.ALONE, now
        return True
