"""The data that the dashboard's server keeps for the live page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs td3-robot[dashboard], which is not installed")

from td3_robot.config.schema import Config
from td3_robot.dashboard.live import BINS_MS, HISTORY, Live, Pace
from td3_robot.messages import Status, Step
from tests.sessions import entries_of

MS = 1_000_000  # ns


def test_the_times_between_messages_follow_the_clock_of_the_node(make_step: Callable[..., Step]) -> None:
    """Of seven Steps, 7 ms apart, one is missing. So four times of 7 ms remain, in the bin up to 10 ms."""
    pace = Pace()
    entries = entries_of([("sim-0", make_step(number)) for number in range(7)], period=7 * MS)
    del entries[3]
    for entry in entries:
        pace.add(replace(entry, received=0))
    assert {edge: count for edge, count in zip(BINS_MS, pace.counts, strict=False) if count} == {10: 4}
    assert len(pace.counts) == len(BINS_MS) + 1


def test_the_server_keeps_a_limited_history_and_a_limited_number_of_nodes(make_step: Callable[..., Step]) -> None:
    live = Live(None, Config())
    for number in range(HISTORY + 5):
        live._publish({"figures": {"steps_per_s": number}})
    history: list[Any] = json.loads(live.history())
    assert [point["steps_per_s"] for point in (history[0], history[-1])] == [5, HISTORY + 4]
    for number in range(100):
        for message in (Status(f"node-{number}", "ready", "", {}, {}), make_step(0, source=f"node-{number}")):
            (entry,) = entries_of([(f"node-{number}", message)])
            live._take(entry, message, {})
    kept = (live._statuses, live._steps, live._paces)
    assert [(len(each), min(each), "node-99" in each) for each in kept] == [(64, "node-36", True)] * 3
