"""What must outlive a restart of the policy server: stops, faults, a freeze, policies that were taken back."""

from __future__ import annotations

from typing import Any

import msgspec


class Latches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in force at a policy server until a person ends it.

    Attributes:
        stop: reason of the server's own emergency stop; empty: none is in force.
        inactive: a person has deactivated it, or reset a stop and not activated it yet.
        stopped: robots that are stopped one by one.
        held: robots the watch over which is in FAULT, and why.
        idle: robots the watch over which was reset or deactivated, and not activated since.
        frozen: learners' weights are refused.
        withdrawn: SHA-256 of the policies that were rolled back from, and not chosen by a person since.
    """

    stop: str = ""
    inactive: bool = False
    stopped: tuple[str, ...] = ()
    held: dict[str, str] = {}
    idle: tuple[str, ...] = ()
    frozen: bool = False
    withdrawn: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As plain JSON values, for messages."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return values
