"""Faults in a recording: ``td3-robot info`` lists each fault once, with its first time and its count."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from td3_robot.cli.main import main
from td3_robot.messages import LifecycleChange, Refused, Status
from td3_robot.recording.faults import Faults, line
from tests.sessions import BEGIN, SECOND, entries_of

Make = Callable[..., Any]


def change(stamp: int, state: str = "fault", reason: str = "no action for 100 ms") -> LifecycleChange:
    return LifecycleChange("sim-0", "active", state, reason, stamp)


def test_info_shows_the_first_time_and_the_count_of_each_fault(save: Make, capsys: Any) -> None:
    """There is one message per second. The first fault occurs at 1 s and again at 4 s."""
    messages = [
        ("sim-0", change(0, "inactive")),
        ("sim-0", change(1)),
        ("policy", change(1)),  # the policy server relays the same change
        ("policy", Refused("hello", "who are you")),  # normal in a handshake, so this is not a fault
        ("sim-0", change(2)),
        ("policy", Refused("name", "taken")),
        ("sim-1", Status("sim-1", "failed", "it fell", {}, {})),
    ]
    path = save("a.mcap", entries_of(messages, SECOND))
    assert main(["info", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == [
        {"what": "sim-0 is in fault: no action for 100 ms", "first_s": 1.0, "count": 2},
        {"what": "policy refused a peer on link policy: taken", "first_s": 5.0, "count": 1},
        {"what": "sim-1 failed: it fell", "first_s": 6.0, "count": 1},
    ]
    assert main(["info", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "fault: at 1.000 s, 2 times: sim-0 is in fault: no action for 100 ms" in printed
    assert "fault: at 6.000 s, once: sim-1 failed: it fell" in printed


def test_the_number_of_different_faults_is_limited() -> None:
    faults = Faults()
    for number in range(300):
        (entry,) = entries_of([("sim-0", change(number, reason=f"because of {number}"))])
        faults.add(entry, change(number, reason=f"because of {number}"))
    report = faults.report(BEGIN)
    assert len(report) == 201
    assert report[-1]["count"] == 100
    assert line(report[-1]) == "100 times: other faults, after the first 200"
