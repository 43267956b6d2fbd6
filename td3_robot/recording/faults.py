"""Finds faults in messages, and counts how often each fault occurs."""

from __future__ import annotations

from typing import Any

from td3_robot.core_types import Farewell
from td3_robot.errors import ProtocolError
from td3_robot.messages import Bye, LifecycleChange, Message, Refused, Status
from td3_robot.recording.entries import Entry
from td3_robot.safety.lifecycle import State
from td3_robot.transport import codec
from td3_robot.util.text import printable

_MOST = 200  # maximum number of different faults to keep, because a peer could invent faults and fill the memory


def failure(message: Message) -> str | None:
    """Text about the failed node or robot, if a message reports a failure; None if it reports no failure."""
    if isinstance(message, Status) and message.state == "failed":
        return f"{message.node} failed: {message.detail}"
    if isinstance(message, LifecycleChange) and message.state == State.FAULT:
        return f"{message.node} is in fault: {message.reason}"
    return None


def failure_in(entry: Entry) -> str | None:
    """Like :func:`failure`, for an entry. Decodes only the topics that can report a failure."""
    if entry.topic not in (Status.NAME, LifecycleChange.NAME):
        return None
    try:
        return failure(codec.decode(entry.topic, entry.payload))
    except ProtocolError:
        return None


def lost(name: str, bye: Bye) -> str | None:
    """Text about the loss of the client ``name``; None if the client left normally or reconnected.

    If a client disappears without a Bye, the link makes a Bye with the reason.
    """
    return f"{name}: {bye.reason}" if Farewell.of(bye) is Farewell.OTHER else None


class Faults:
    """Counts failures of nodes and robots, and refused peers."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}  # first time (ns) and count
        self._stamps: dict[str, int] = {}  # stamp of each fault's newest LifecycleChange, to detect repetitions
        self._others = 0

    def add(self, entry: Entry, message: Message) -> str | None:
        """Count the fault in a message. Returns the text of the fault.

        Returns None if there is no fault, or if the message is a repetition. Also returns None if the fault is new, but
        Faults already keeps _MOST faults.
        """
        what = failure(message)
        if isinstance(message, Refused) and message.code != "hello":  # with this code, a server asks for a Hello
            what = f"{entry.publisher} refused a peer on link {entry.link}: {message.reason}"
        if what is None:
            return None
        if what not in self._found and len(self._found) == _MOST:
            self._others += 1
            return None
        if isinstance(message, LifecycleChange):
            if self._stamps.get(what) == message.stamp:
                return None
            self._stamps[what] = message.stamp
        first, count = self._found.get(what, (entry.received, 0))
        self._found[what] = first, count + 1
        return what

    def report(self, begin: int) -> list[dict[str, Any]]:
        """The faults, in the order in which they first appeared.

        ``first_s`` is the time of the first appearance, in seconds after ``begin`` (ns since 1970).
        """
        rows = [
            {"what": what, "first_s": round((first - begin) * 1e-9, 3), "count": count}
            for what, (first, count) in self._found.items()
        ]
        if self._others:
            rows.append({"what": f"other faults, after the first {_MOST}", "first_s": None, "count": self._others})
        return rows


def line(fault: dict[str, Any]) -> str:
    """One fault of :meth:`Faults.report` as a line of text."""
    when = "" if fault["first_s"] is None else f"at {fault['first_s']:.3f} s, "
    times = "once" if fault["count"] == 1 else f"{fault['count']} times"
    return f"{when}{times}: {printable(fault['what'])}"
