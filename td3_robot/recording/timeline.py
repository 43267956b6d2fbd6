"""Collects the events of a recording (faults, gaps, states, commands, starts), and a robot's channels over time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from td3_robot.errors import UsageError
from td3_robot.messages import Command, LifecycleChange, Message, Start, Step
from td3_robot.recording.entries import Entry, jumped
from td3_robot.recording.values import robot_of
from td3_robot.specs import Channel, RobotSpec
from td3_robot.util.text import printable

_EVENTS = 500  # maximum number of events of one kind
_SOURCES = 200  # maximum number of sources whose robots can be selected
# A channel has at most 2 * _POINTS points. If Steps are left out, a channel still has at least _POINTS points.
_POINTS = 2000


class Timeline:
    """The events of a recording, and the channels of one robot at every n-th Step.

    Args:
        robot: ``SOURCE/N``, robot N (from 0) of a source; None selects the first robot with a Step.
    """

    def __init__(self, robot: str | None = None) -> None:
        self._robot = robot
        self._begin = 0  # ns since 1970
        self._events: list[tuple[int, str, str]] = []  # received time (ns since 1970), kind, text
        self._counts: Counter[str] = Counter()
        self._stamps: dict[tuple[str, str], int] = {}  # by node and state: stamp of the newest change
        self._specs: dict[str, RobotSpec] = {}
        self._robots: dict[str, int] = {}  # number of robots of each source
        self._rows: list[tuple[int, list[float | None]]] = []  # time (ns since 1970), values
        self._steps = 0  # Steps of the selected robot
        self._every = 1  # n; the rows are every n-th Step
        self._offset: int | None = None  # the recorder's clock minus the source's clock, in ns
        self._sizes: tuple[int, int] | None = None  # numbers of observation and action channels in the rows

    def add_entry(self, entry: Entry, missing: int) -> None:
        """Note a message, and how many messages are missing directly before it."""
        self._begin = min(self._begin or entry.received, entry.received)
        if missing:
            self._note(entry, "gap", f"{entry.publisher}/{entry.topic}: {missing} missing")

    def add(self, entry: Entry, message: Message, fault: str | None) -> None:
        """Note the event in a message, if there is one. ``fault`` is the fault that the message reports."""
        if isinstance(message, LifecycleChange):
            self._add_change(entry, message, fault)
        elif fault is not None:
            self._note(entry, "fault", fault)
        elif isinstance(message, Command):
            about = f" {message.target}" if message.target else ""
            reason = f": {message.reason}" if message.reason else ""
            self._note(entry, "command", f"{entry.publisher} sends {message.verb}{about}{reason}")
        elif isinstance(message, Start):
            self._note(entry, "start", f"{entry.publisher} ({message.role}) starts")
        elif isinstance(message, Step):
            self._add_step(entry, message)
        elif len(self._specs) < _SOURCES and (spec := robot_of(message)):
            self._specs.setdefault(entry.publisher, spec)

    def _add_change(self, entry: Entry, change: LifecycleChange, fault: str | None) -> None:
        """Note a change of state once, although several nodes may publish it."""
        key = change.node, change.state
        if self._stamps.get(key) == change.stamp:
            return
        self._stamps[key] = change.stamp
        reason = f": {change.reason}" if change.reason else ""
        text = fault or f"{change.node} is {change.state}, was {change.previous}{reason}"
        self._note(entry, "fault" if fault else "state", text)

    def _note(self, entry: Entry, kind: str, text: str) -> None:
        event = entry.received, kind, text
        # If a Command goes to all robots, the server records it several times: once for each robot.
        if self._events and self._events[-1] == event:
            return
        self._counts[kind] += 1
        if self._counts[kind] <= _EVENTS:
            self._events.append(event)

    def _add_step(self, entry: Entry, step: Step) -> None:
        source = entry.publisher
        if source in self._robots or len(self._robots) < _SOURCES:
            self._robots[source] = max(len(step.phase), self._robots.get(source, 0))
        self._robot = self._robot or f"{source}/0"
        if self._robot not in {f"{source}/{index}" for index in range(len(step.phase))}:
            return
        sizes = step.observation.shape[1], step.action.shape[1]
        self._sizes = self._sizes or sizes
        if self._sizes == sizes:
            self._add_row(entry, step, int(self._robot.rpartition("/")[2]))

    def _add_row(self, entry: Entry, step: Step, index: int) -> None:
        """Keep the values of every n-th Step. n doubles when there are too many rows."""
        time = self._time(entry)
        if self._steps % self._every == 0:
            values = [*step.observation[index].tolist(), *step.action[index].tolist()]
            self._rows.append((time, [value if math.isfinite(value) else None for value in values]))
            if len(self._rows) > 2 * _POINTS:
                self._rows = self._rows[::2]
                self._every *= 2
        self._steps += 1

    def _time(self, entry: Entry) -> int:
        """The time of a Step, in ns on the recorder's clock.

        A source sends its Steps to the recorder in groups, so only the source's clock shows the time between Steps.
        If the source's clock has changed, this method computes the offset between the two clocks again, from this Step.
        """
        if self._offset is None or jumped(entry.published + self._offset, entry.received):
            self._offset = entry.received - entry.published
        return entry.published + self._offset

    def report(self) -> dict[str, Any]:
        """The timeline as plain JSON values, with times in s. Raises a UsageError if the recording lacks the robot."""
        known = [f"{source}/{index}" for source, robots in self._robots.items() for index in range(robots)]
        if self._robot is not None and self._robot not in known:
            raise UsageError(f"--robot {self._robot!r}: the recording has no such robot; allowed: {_some(known)}")
        return {
            "events": [
                {"time_s": self._seconds(time), "kind": kind, "text": text}
                for time, kind, text in sorted(self._events, key=lambda event: event[0])
            ],
            "events_left_out": sum(max(0, count - _EVENTS) for count in self._counts.values()),
            "robots": known,
            "robot": self._channels() if self._robot else None,
        }

    def _channels(self) -> dict[str, Any]:
        assert self._robot
        spec = self._specs.get(self._robot.rpartition("/")[0])
        rows = sorted(self._rows, key=lambda row: row[0])
        columns = [list(column) for column in zip(*(values for _, values in rows), strict=True)]
        described = {"observation": spec.observations if spec else (), "action": spec.actions if spec else ()}
        about = [
            _about(channels, index, kind)
            for (kind, channels), size in zip(described.items(), self._sizes or (0, 0), strict=True)
            for index in range(size)
        ]
        return {
            "name": self._robot,
            "steps": self._steps,
            "every": self._every,
            "time_s": [self._seconds(time) for time, _ in rows],
            "channels": [{**facts, "values": column} for facts, column in zip(about, columns, strict=True)],
        }

    def _seconds(self, time: int) -> float:
        return round((time - self._begin) * 1e-9, 3)


def _about(channels: Sequence[Channel], index: int, kind: str) -> dict[str, str]:
    """The kind, name and unit of a channel. A channel that no Hello describes has its index as its name."""
    name, unit = (channels[index].name, channels[index].unit) if index < len(channels) else (str(index), "")
    return {"kind": kind, "name": name, "unit": unit}


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "none: the recording has no Steps"


def event_line(event: dict[str, Any]) -> str:
    return f"at {event['time_s']:.3f} s, {event['kind']}: {printable(event['text'])}"
