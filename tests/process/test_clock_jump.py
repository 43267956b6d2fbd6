"""The wall clock jumps while a robot is driven and recorded. The jump must not affect deadlines.

A test must not set the machine's clock. Instead, wall_clock/sitecustomize.py adds an offset from a file to
``time.time`` and ``time.time_ns`` of the Python processes. libzmq and kernel timeouts use the monotonic clock, so they
need no offset.
"""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from td3_robot.messages import Step
from td3_robot.recording import info
from td3_robot.recording.reader import Session
from td3_robot.replay import check as replay
from tests.process.deployed_robot import PATIENT, POLICY, SAFE, periods
from tests.process.test_deployed_recording import Recorded, stop

HOUR = 3600


@pytest.mark.slow
def test_wall_clock_jumps_of_hours_cause_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadlines of the safety settings are one minute.

    If the nodes measured them with the wall clock, a jump forward would exceed them.
    """
    offset, folder = tmp_path / "offset", Path(__file__).parent / "wall_clock"
    monkeypatch.setenv("WALL_CLOCK", str(offset))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    robot = Recorded(tmp_path)

    def jump(to: int) -> None:
        new = tmp_path / "offset.new"
        new.write_text(str(to))
        new.rename(offset)

    def keep_driving(turns: int = 25) -> None:
        begin = len(robot.record())
        robot.wait("more control periods", lambda: periods(robot.record()[begin:]) > turns)

    try:
        jump(0)
        robot.configure(**PATIENT, frozen_ms=60_000)
        recorder, server, driver = robot.recorder(), robot.serve(), robot.drive()
        begin = robot.running()
        for to in (5 * HOUR, -10 * HOUR):
            jump(to)
            keep_driving()
        assert robot.operator("state").returncode == 0
        assert set(robot.record()[begin:]) == {"observe good", POLICY}
        # Restart the driver while the clock is 10 h behind. Incarnations are start times, so the new driver has a lower
        # incarnation than the old driver.
        driver.kill()
        driver.wait()
        (tmp_path / "record").unlink()
        driver = robot.drive()
        begin = robot.running()
        jump(0)
        keep_driving(400)  # 8 s: for 5 s, the recorder still knows the killed driver and refuses the new driver
        assert set(robot.record()[begin:]) == {"observe good", POLICY}
        stop(driver, server, recorder)
        assert robot.record()[-1] == SAFE
    finally:
        robot.end()

    for name in ("driver.log", "server.log"):
        assert "fault" not in robot.log(name)
        assert "dropped" not in robot.log(name)
    times = [datetime.fromisoformat(text) for text in re.findall(r"^(\S+ \S+),\d+ leg ", robot.log("driver.log"), re.M)]
    assert max(times) - min(times) > timedelta(hours=9)  # the log shows the start times of both drivers, 10 h apart

    session = Session([tmp_path / "leg.mcap"])
    assert len({step.incarnation for _, step in session.messages_of(Step)}) == 2
    entries = [entry for entry, _ in session.messages()]
    received, published = [entry.received for entry in entries], [entry.published for entry in entries]
    assert received == sorted(received)
    assert (received[-1] - received[0]) * 1e-9 < HOUR  # the recorder's time does not jump
    # The recording keeps the publishers' wall times, with jumps to +5 h and -10 h.
    assert (max(published) - min(published)) * 1e-9 > 14 * HOUR
    report = info.examine(tmp_path / "leg.mcap")
    assert (report["damages"], report["faults"]) == ([], [])
    assert {stream["missing"] for stream in report["topics"].values()} == {0}
    reports = replay.check(session)
    assert all(core.same for core in reports), replay.text(session, reports)
    assert {core.core for core in reports if core.turns} == {"policy", "driver"}
