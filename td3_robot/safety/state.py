"""The state that a policy server keeps across a restart: stops, faults, a freeze, withdrawn policies and takeovers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from td3_robot.safety.lifecycle import STOP_PREFIX, Cause, Held

_LONGEST = 500  # characters of the text about a source


@dataclass(frozen=True)
class SafetyState:
    """Stops, faults and decisions that a restart of the policy server does not clear.

    Attributes:
        server: why the server is stopped or inactive; None if the server is neither stopped nor inactive.
        sources: maps the name of a source to the reason why no policy moves the robots of this source.
        stopped: names of the sources that a person stopped individually.
        frozen: whether the server refuses the weights of learners.
        withdrawn: SHA-256 of the policies that a rollback withdrew and that no person has chosen again.
        operated: maps the name of a source to the indices of its robots that operators have taken over.
    """

    server: Held | None = None
    sources: Mapping[str, Held] = field(default_factory=dict)
    stopped: tuple[str, ...] = ()
    frozen: bool = False
    withdrawn: tuple[str, ...] = ()
    operated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the state as plain values for the message Latches.

        The key ``held`` contains a text for each source with an emergency stop or a fault. The text of an emergency
        stop begins with STOP_PREFIX. Every other text describes a fault.
        """
        server = self.server or Held(Cause.FAULT)
        sources = self.sources.items()
        operated = {name: list(robots) for name, robots in self.operated.items()}
        return {
            "stop": server.reason if server.cause is Cause.STOP else "",
            "inactive": server.cause is Cause.INACTIVE,
            "stopped": list(self.stopped),
            "held": {name: str(held)[:_LONGEST] for name, held in sources if held.cause is not Cause.INACTIVE},
            "idle": [name for name, held in sources if held.cause is Cause.INACTIVE],
            "frozen": self.frozen,
            "withdrawn": list(self.withdrawn),
            **({"operated": operated} if operated else {}),
        }

    def stored(self) -> dict[str, Any]:
        """Return the state as plain values for a file. :func:`read` reads them."""
        values = self.plain()
        causes = {name: self.sources[name].cause.value for name in values["held"]}
        return {**values, "causes": causes} if causes else values


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state in a file. Version 0.1.0 writes no ``causes`` and no ``operated``."""

    stop: str = ""
    inactive: bool = False
    stopped: tuple[str, ...] = ()
    held: dict[str, str] = {}
    idle: tuple[str, ...] = ()
    frozen: bool = False
    withdrawn: tuple[str, ...] = ()
    causes: dict[str, Cause] = {}
    operated: dict[str, tuple[int, ...]] = {}


def read(values: Any) -> SafetyState:
    """Return the state from plain values that this version or version 0.1.0 stored.

    Raises:
        msgspec.ValidationError: a value has a wrong name or a wrong type.
    """
    stored = msgspec.convert(values, _Stored)
    server = Held(Cause.STOP, stored.stop) if stored.stop else Held(Cause.INACTIVE) if stored.inactive else None
    sources = {name: _held(text, stored.causes.get(name)) for name, text in stored.held.items()}
    sources |= {name: Held(Cause.INACTIVE) for name in stored.idle}
    return SafetyState(server, sources, stored.stopped, stored.frozen, stored.withdrawn, stored.operated)


def _held(text: str, cause: Cause | None) -> Held:
    """Return why no policy moves the robots of a source. If the file stores no cause, the text determines the cause."""
    if cause is None:
        cause = Cause.STOP if text.startswith(STOP_PREFIX) else Cause.FAULT
    return Held(cause, text.removeprefix(STOP_PREFIX) if cause is Cause.STOP else text)
