"""The data that the dashboard's server keeps for the live page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs td3-robot[dashboard], which is not installed")

from td3_robot_sims import tasks

from td3_robot.config.schema import Config
from td3_robot.dashboard import drawing
from td3_robot.dashboard.live import BINS_MS, HISTORY, Live, Pace
from td3_robot.messages import Status, Step
from td3_robot.monitor.core import Monitor
from td3_robot.transport.link import hello
from tests.sessions import entries_of

MS = 1_000_000  # ns


def test_the_times_between_messages_follow_the_clock_of_the_node(make_step: Callable[..., Step]) -> None:
    """Seven Steps are 7 ms apart, and one is missing. The six others have five intervals.

    The interval with the gap does not count, so the bin up to 10 ms has four.
    """
    pace = Pace()
    entries = entries_of([("sim-0", make_step(number)) for number in range(7)], period=7 * MS)
    del entries[3]
    for entry in entries:
        pace.add(replace(entry, received=0))
    assert {edge: count for edge, count in zip(BINS_MS, pace.counts, strict=False) if count} == {10: 4}
    assert len(pace.counts) == len(BINS_MS) + 1


@pytest.mark.parametrize("jump", [3600_000, -3600_000])
def test_a_jump_of_a_nodes_clock_is_no_time_between_messages(jump: int, make_step: Callable[..., Step]) -> None:
    """Seven Steps are 7 ms apart. The clock jumps by an hour between two of them, so five of six intervals count."""
    pace = Pace()
    for entry in entries_of([("sim-0", make_step(number)) for number in range(7)], period=7 * MS):
        pace.add(replace(entry, published=entry.published + jump * MS * (entry.sequence >= 3)))
    assert {edge: count for edge, count in zip(BINS_MS, pace.counts, strict=False) if count} == {10: 5}
    assert pace.counts[-1] == 0


def test_the_time_axis_of_the_page_does_not_go_back_with_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(None, Config())
    for jump in (0, 7200, -7200):
        now = time.time_ns() + jump * 10**9
        with monkeypatch.context() as clock:
            clock.setattr(time, "time_ns", lambda now=now: now)
            clock.setattr(time, "time", lambda now=now: now * 1e-9)
            live._publish({})
    times = [point["time"] for point in json.loads(live.history())]
    assert times == sorted(times)
    assert times[-1] - times[0] < 3600


def test_each_node_of_the_largest_run_keeps_its_histogram(make_step: Callable[..., Step]) -> None:
    """64 simulators and 64 policy servers send three messages each, in turn. So each histogram has two intervals."""
    live = Live(None, Config())
    names = [f"{kind}-{number}" for kind in ("sim", "policy") for number in range(64)]
    sent = [(name, make_step(number, source=name)) for number in range(3) for name in names]
    for entry, (_, message) in zip(entries_of(sent), sent, strict=True):
        live._take(entry, message, {})
    assert [sum(live._paces[name].counts) for name in names] == [2] * len(names)


def test_the_server_keeps_a_limited_history_and_a_limited_number_of_nodes(
    make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 64 names, the server keeps the newest 64 of 100 nodes: node-36 to node-99."""
    monkeypatch.setattr(drawing, "NAMES", 64)
    live = Live(None, Config())
    for number in range(HISTORY + 5):
        live._publish({"figures": {"steps_per_s": number}})
    history: list[Any] = json.loads(live.history())
    assert [point["steps_per_s"] for point in (history[0], history[-1])] == [5, HISTORY + 4]
    monitor = Monitor(0, live._take)
    for number in range(100):
        name = f"node-{number}"
        robot = hello("driver", name, client=number, robots=1, spec=tasks.spec("Walker2D"))
        for message in (robot, Status(name, "ready", "", {}, {}), make_step(0, source=name)):
            (entry,) = entries_of([(name, message)])
            live._take(entry, message, {})
        monitor.loop_ms = {name: [1.0]}
        live._snapshot(monitor)
    kept = (live._statuses, live._steps, live._paces, live._latency, live._drawing.sources)
    assert [(len(each), min(each), "node-99" in each) for each in kept] == [(64, "node-36", True)] * 5
