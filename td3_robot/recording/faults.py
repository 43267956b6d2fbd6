"""Collects faults from recorded messages: each fault once, with its first time and its count."""

from __future__ import annotations

from typing import Any

from td3_robot.messages import LifecycleChange, Message, Refused
from td3_robot.recording import triggers
from td3_robot.recording.entries import Entry

_MOST = 200  # different faults that are kept: a peer must not fill the memory with invented ones


class Faults:
    """Nodes and robots that failed, and peers that were refused."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}  # first time (ns) and count
        self._stamps: dict[str, int] = {}  # of the newest change with each fault: a server sends changes again
        self._others = 0

    def look(self, entry: Entry, message: Message) -> str | None:
        """Take a message; returns the fault in it, or None if there is no new one."""
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
        """The faults in the order of their first time, in seconds after ``begin`` (ns since 1970)."""
        rows = [
            {"what": what, "first_s": round((first - begin) * 1e-9, 3), "count": count}
            for what, (first, count) in self._found.items()
        ]
        if self._others:
            rows.append({"what": f"other faults, after the first {_MOST}", "first_s": None, "count": self._others})
        return rows


def line(fault: dict[str, Any]) -> str:
    """One fault of :meth:`Faults.report`, for a person."""
    when = "" if fault["first_s"] is None else f"at {fault['first_s']:.3f} s, "
    times = "once" if fault["count"] == 1 else f"{fault['count']} times"
    return f"{when}{times}: {fault['what']}"
