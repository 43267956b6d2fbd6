"""The timeline of a recording: events, gaps, and the channels of one robot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.messages import Command, LifecycleChange, Start
from td3_robot.recording.entries import Entry
from td3_robot.recording.info import examine
from td3_robot.recording.timeline import Timeline
from tests.sessions import BEGIN, SECOND, entries_of

Make = Callable[..., Any]
MS = SECOND // 1000


def test_a_repeated_event_is_listed_once_and_each_event_and_gap_has_a_time(
    make_step: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = LifecycleChange("leg", "active", "fault", "hot", 7)
    entries = entries_of(
        [
            ("leg", Start("driver", "", {})),
            *(("leg", make_step()) for _ in range(4)),
            ("leg", failed),
            ("policy", failed),  # the policy server forwards the message
            ("policy", Command(id=5, target="leg", verb="reset", reason="by hand", version=0, sha256="", payload=b"")),
            ("leg", LifecycleChange("leg", "fault", "inactive", "", 8)),
        ],
        period=SECOND,
    )
    del entries[3]
    file = save("short.mcap", entries)
    assert examine(file, Timeline())["events"] == [
        {"time_s": 0.0, "kind": "start", "text": "leg (driver) starts"},
        {"time_s": 4.0, "kind": "gap", "text": "leg/step: 1 missing"},
        {"time_s": 5.0, "kind": "fault", "text": "leg is in fault: hot"},
        {"time_s": 7.0, "kind": "command", "text": "policy sends reset leg: by hand"},
        {"time_s": 8.0, "kind": "state", "text": "leg is inactive, was fault"},
    ]
    assert main(["info", str(file), "--timeline"]) == 0
    assert "at 4.000 s, gap: leg/step: 1 missing\n" in capsys.readouterr().out


def test_a_text_with_a_newline_stays_on_one_line(make_step: Make, save: Make, capsys: Any) -> None:
    """An operator or an exception of a driver can give such a text. The report of ``--json`` holds it unchanged."""
    command = Command(id=5, target="", verb="estop", reason="a\nb", version=0, sha256="", payload=b"")
    messages = [
        ("leg", make_step()),
        ("policy", command),
        ("leg", LifecycleChange("leg", "active", "inactive", "c\x1b\nd", 7)),
        ("leg", LifecycleChange("leg", "inactive", "fault", "e\nf", 8)),
    ]
    file = save("a.mcap", entries_of(messages, period=SECOND))
    assert main(["info", str(file), "--timeline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:] == [
        "fault: at 3.000 s, once: 'leg is in fault: e\\nf'",
        "at 1.000 s, command: 'policy sends estop: a\\nb'",
        "at 2.000 s, state: 'leg is inactive, was active: c\\x1b\\nd'",
        "at 3.000 s, fault: 'leg is in fault: e\\nf'",
    ]
    assert examine(file, Timeline())["events"][0]["text"] == "policy sends estop: a\nb"


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (4000, 1), (4001, 2), (9000, 4)])
def test_a_long_recording_shows_each_nth_step(make_step: Make, save: Make, steps: int, every: int) -> None:
    """A channel has at most 4000 points. If one more point comes, n doubles."""
    made = entries_of(
        [("sim-0", make_step(action=np.full((1, 2), number, np.float32))) for number in range(steps)], period=20 * MS
    )
    robot = examine(save("long.mcap", made), Timeline())["robot"]
    assert (robot["steps"], robot["every"]) == (steps, every)
    assert robot["channels"][-1]["values"] == list(range(0, steps, every))
    assert robot["time_s"] == pytest.approx([0.02 * number for number in range(0, steps, every)], abs=1e-3)


@pytest.mark.parametrize("jump", [0, 3600 * SECOND, -3600 * SECOND])
def test_steps_that_arrive_in_groups_have_the_times_of_the_source(make_step: Make, save: Make, jump: int) -> None:
    """100 Steps at 50 Hz arrive in groups of five. In two cases, the source's clock jumps by an hour at Step 60."""
    made: list[Entry] = []
    for number, entry in enumerate(entries_of([("leg", make_step())] * 100)):
        published = BEGIN + number * 20 * MS + jump * (number >= 60)
        made.append(replace(entry, published=published, received=BEGIN + (number // 5 * 5 + 4) * 20 * MS))
    times = examine(save("groups.mcap", made), Timeline())["robot"]["time_s"]
    assert np.diff(times[:60]) == pytest.approx(0.02, abs=2e-3)
    assert np.diff(times[60:]) == pytest.approx(0.02, abs=2e-3)
    assert times[60] - times[59] == pytest.approx(0.02, abs=0.1 if jump else 2e-3)


def test_a_robot_that_is_not_in_the_recording_is_an_error(
    make_step: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    file: Path = save("one.mcap", entries_of([("sim-0", make_step())]))
    robots = examine(file, Timeline())["robots"]
    for wrong in ("sim-1/0", "sim-0", "sim-0/-1", "sim-0/00", f"sim-0/{len(robots)}"):
        assert main(["info", str(file), "--json", "--timeline", "--robot", wrong]) == 2
        error = capsys.readouterr().err
        assert f"--robot {wrong!r}: the recording has no such robot; allowed: {', '.join(robots)}" in error
    assert main(["info", str(file), "--json", "--timeline", "--robot", robots[-1]]) == 0
    assert json.loads(capsys.readouterr().out)["robot"]["name"] == robots[-1]
    assert main(["info", str(file), "--robot", robots[0]]) == 2
    assert "--robot needs --timeline and --json" in capsys.readouterr().err
