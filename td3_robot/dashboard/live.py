"""Collects what the dashboard shows live: the newest messages of each node, and a history of the main figures."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections import deque
from typing import Any

import msgspec

from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES
from td3_robot.dashboard.drawing import Drawing, keep
from td3_robot.errors import Td3RobotError
from td3_robot.messages import Action, ActionOrigin, Hello, Message, Phase, Status, Step, Weights
from td3_robot.monitor.core import Monitor
from td3_robot.monitor.node import ACCEPTS
from td3_robot.recording.entries import Entry, jumped
from td3_robot.recording.values import Names
from td3_robot.runtime.node import Node
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import MONITOR
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys

PERIOD = 0.5
"""Seconds between two snapshots."""
HISTORY = 1200
"""The maximum number of points in the history. These points cover 10 minutes."""
BINS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Upper edges of the bins of a histogram of times, in ms. The last bin has no upper edge."""

_PAUSE = 0.05  # seconds of sleep if no message waits; a shorter sleep would take more processor time from a training
LISTED = 16
"""The maximum number of robots of one source in a snapshot."""
_PACE = (Step.NAME, Action.NAME, Weights.NAME)  # the times between messages of these topics show a node's speed
_TRENDS = ("steps_per_s", "updates_per_s", "replay_ratio", "staleness_updates", "return_mean")


def _no_times() -> list[int]:
    return [0] * (len(BINS_MS) + 1)


def _count(counts: list[int], milliseconds: float) -> None:
    """Count a time in a histogram."""
    counts[bisect.bisect_left(BINS_MS, milliseconds)] += 1


class Pace:
    """A histogram of the times between successive messages of a node, measured with the node's clock.

    Attributes:
        counts: number of measured times in each bin.
    """

    def __init__(self) -> None:
        self.counts = _no_times()
        self._last: Entry | None = None

    def add(self, entry: Entry) -> None:
        last, self._last = self._last, entry
        if last and (last.stream, last.sequence + 1) == (entry.stream, entry.sequence):  # no message is missing
            passed = entry.published - last.published
            if not jumped(passed, entry.received - last.received):
                _count(self.counts, passed * 1e-6)


class Live:
    """A thread that attaches to the nodes of a run or a robot.

    If the run is restarted, the thread attaches to the new nodes.

    Args:
        folder: folder of the run, with the configuration of the run; None if there is no run.
        config: configuration of the robot, if there is no run.

    Attributes:
        number: number of the newest snapshot, from 1; 0 before the first snapshot.
        newest: the newest snapshot as JSON. Any thread may read it.
        viewers: number of open pages. The thread computes pictures of the robots only while a page is open.
    """

    def __init__(self, folder: RunFolder | None, config: Config) -> None:
        self.number = 0
        self.newest = b"{}"
        self.viewers = 0
        self._folder, self._config = folder, config
        self._epoch = time.time_ns() - time.monotonic_ns()  # from now on, changes of the wall clock have no effect
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)
        self._forget()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5.0)

    def history(self) -> bytes:
        """The history as a JSON list of maps, oldest first."""
        with self._lock:
            return msgspec.json.encode(list(self._history))

    def _forget(self) -> None:
        self._clients: dict[str, Hello] = {}
        self._statuses: dict[str, Status] = {}
        self._steps: dict[str, Step] = {}
        self._latency: dict[str, list[int]] = {}  # histogram of loop times, by source
        self._paces: dict[str, Pace] = {}  # by node
        self._drawing = Drawing()

    def _run(self) -> None:
        while not self._ended.is_set():
            problem = "no node runs"
            try:
                self._attach()
            except Td3RobotError as error:
                problem = str(error)
            self._forget()
            self._publish({"problem": problem, "nodes": [], "robots": []})
            self._ended.wait(1.0)

    def _attach(self) -> None:
        """Receive messages until the dashboard ends, or until the run ends or starts again.

        Raises:
            Td3RobotError: the run is not running when this method begins, or this process cannot serve the link for
                monitors.
        """
        config = self._folder.config() if self._folder else self._config
        bus = Bus(keys=open_keys(config.endpoints.keys))
        node = Node(MONITOR, "dashboard", time.time_ns() // 1_000_000, self._folder, config, bus)
        endpoints = self._endpoints()
        try:
            node.listen(MONITOR, ACCEPTS)
            monitor = Monitor(self._epoch, self._take)
            due = time.monotonic() + PERIOD
            while not self._ended.is_set():
                if inputs := bus.receive(0.0):
                    monitor.step(inputs, time.monotonic())
                else:
                    self._ended.wait(_PAUSE)
                if time.monotonic() >= due:
                    due = time.monotonic() + PERIOD
                    self._publish(self._snapshot(monitor))
                    if self._endpoints() != endpoints:
                        return
        finally:
            bus.close("done")

    def _endpoints(self) -> Any:
        return self._folder.read_run().get("endpoints") if self._folder else None

    def _take(self, entry: Entry, message: Message, names: Names) -> None:
        """Keep the newest Hello, Status and Step of each node, and measure the times between its messages."""
        del names
        if entry.topic in _PACE:
            keep(self._paces, entry.publisher, self._paces.get(entry.publisher) or Pace())
            self._paces[entry.publisher].add(entry)
        if isinstance(message, Hello):
            keep(self._clients, message.name, message)
            self._drawing.learn(message)
        elif isinstance(message, Status):
            keep(self._statuses, message.node, message)
        elif isinstance(message, Step):
            keep(self._steps, message.source, message)
            if self.viewers:
                self._drawing.add(message)

    def _snapshot(self, monitor: Monitor) -> dict[str, Any]:
        for source, times in monitor.loop_ms.items():
            counts = self._latency.get(source) or _no_times()
            keep(self._latency, source, counts)
            for milliseconds in times:
                _count(counts, milliseconds)
        report = monitor.report(time.monotonic())
        figures = next((item.figures for item in self._statuses.values() if "env_steps" in item.figures), {})
        return {
            "problem": "" if report["topics"] else "no node has sent a message yet",
            "nodes": self._nodes(report),
            "figures": figures,
            "loop_ms": report["loop_ms"],
            "latency": self._latency,
            "faults": report["faults"][-50:],
            "begun": report["time"] - report["elapsed_s"],
            "robots": [robot for step in self._steps.values() for robot in _robots(step)],
            "drawable": list(self._drawing.sources),
            "drawn": self._drawing.take(),
            "specs": {name: hello.spec for name, hello in self._clients.items() if hello.role in ROBOT_ROLES},
        }

    def _nodes(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for name, topic in report["topics"].items():
            topics.setdefault(name.rpartition("/")[0], []).append(topic)
        rows = []
        for name in sorted(topics.keys() | report["states"].keys() | self._statuses.keys()):
            status, own = self._statuses.get(name), topics.get(name, [])
            state = report["states"].get(name) or (status.state if status else "")
            rows.append(
                {
                    "name": name,
                    "role": self._clients[name].role if name in self._clients else "",
                    "state": state,
                    "detail": status.detail.removeprefix(f"{state}: ") if status else "",
                    "rate_hz": sum(topic["rate_hz"] or 0.0 for topic in own),
                    "pace": self._paces[name].counts if name in self._paces else None,
                    "age_s": min((topic["age_s"] for topic in own), default=None),
                    "missing": sum(topic["missing"] for topic in own),
                    "counters": {key: value for key, value in status.counters.items() if value} if status else {},
                    "figures": status.figures if status else {},
                }
            )
        return rows

    def _publish(self, snapshot: dict[str, Any]) -> None:
        point = {name: value for name, value in snapshot.get("figures", {}).items() if name in _TRENDS}
        point["loop_ms"] = max((times["median"] for times in snapshot.get("loop_ms", {}).values()), default=None)
        point["time"] = round((self._epoch + time.monotonic_ns()) * 1e-9, 3)
        whole = {**snapshot, "point": point, "metrics": self._metrics_version()}
        with self._lock:
            self._history.append(point)
        self.newest = msgspec.json.encode(whole)  # infinite limits and NaN become null
        self.number += 1

    def _metrics_version(self) -> str:
        """A text that changes when ``metrics.jsonl`` changes; empty without the file."""
        with contextlib.suppress(OSError):
            if self._folder:
                found = self._folder.metrics_file.stat()
                return f"{found.st_mtime_ns}-{found.st_size}"
        return ""


def _robots(step: Step) -> list[dict[str, Any]]:
    """The newest values of a source's robots; only the first LISTED robots, if there are more."""
    return [
        {
            "source": step.source,
            "index": index,
            "robots": len(step.phase),
            "phase": Phase(step.phase[index]).name.lower(),
            "episode": int(step.episode[index]),
            "episode_step": int(step.episode_step[index]),
            "reward": float(step.reward[index]),
            "origin": ActionOrigin.name_of(step.origin_of(index)),
            "observation": step.observation[index].tolist(),
            "action": step.action[index].tolist(),
        }
        for index in range(min(len(step.phase), LISTED))
    ]
