"""Collects the different faults in recorded messages, with the first time and the count of each."""

from __future__ import annotations

from typing import Any

from td3_robot.messages import LifecycleChange, Message, Refused
from td3_robot.recording import triggers
from td3_robot.recording.entries import Entry

_MOST = 200  # the most different faults kept, so that a peer cannot fill the memory with invented faults


class Faults:
    """Nodes and robots that failed, and peers that were refused."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}  # first time (ns) and count
        self._stamps: dict[str, int] = {}  # stamp of the newest LifecycleChange of a fault; servers repeat them
        self._others = 0

    def look(self, entry: Entry, message: Message) -> str | None:
        """Count the fault in a message. Returns the fault, or None if the message adds no fault."""
        what = triggers.reason(entry)
        if isinstance(message, Refused) and message.code != "hello":
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
        """The faults in order of first time. ``first_s`` is in seconds after ``begin`` (ns since 1970)."""
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
    return f"{when}{times}: {fault['what']}"
