"""Monitors, ``topic echo`` commands and recorders attach to a running robot. None of them causes a fault."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from td3_robot.recording.reader import Session
from tests.process.deployed_robot import PATIENT, POLICY, Robot, periods


class Watched(Robot):
    """A robot whose configuration names no monitor and no recorder."""

    def watch(self, log: str, *words: str) -> subprocess.Popen[str]:
        return self._start(log, "-m", "td3_robot.cli.main", *words, "--config", "robot.yaml")

    def lines(self, log: str) -> list[Any]:
        return [json.loads(line) for line in self.log(log).splitlines() if line.startswith("{") and line.endswith("}")]

    def sees_both(self, log: str) -> bool:
        """Return whether one report of a monitor contains Steps of the driver and also Actions of the server."""
        return any({"leg/step", "policy/action"} <= report["topics"].keys() for report in self.lines(log))


@pytest.fixture
def robot(tmp_path: Path) -> Any:
    made = Watched(tmp_path)
    yield made
    made.end()


@pytest.mark.slow
def test_many_listeners_attach_to_a_running_robot_and_delete_their_sockets(robot: Watched) -> None:
    """While a monitor pauses, the robot has no fault, and the server's memory grows by less than 4 MB.

    A listener deletes its socket when it ends. A killed listener cannot do so.
    """
    robot.configure(**PATIENT)
    server, _ = robot.serve(), robot.drive()
    robot.wait_for(POLICY)
    monitors = [robot.watch(f"monitor{n}.log", "monitor", "--json", "--every", "0.2") for n in range(3)]
    echoes = [robot.watch(f"echo{n}.log", "topic", "echo", topic) for n, topic in enumerate(("step", "action"))]
    recorders = [robot.watch(f"record{n}.log", "record", f"leg{n}.mcap") for n in range(2)]
    for n in range(3):
        robot.wait("a report with both nodes", lambda n=n: robot.sees_both(f"monitor{n}.log"))
    for n, topic in enumerate(("step", "action")):
        robot.wait("messages", lambda n=n: len(robot.lines(f"echo{n}.log")) > 10)
        assert robot.lines(f"echo{n}.log")[0]["publisher"] == {"step": "leg", "action": "policy"}[topic]
    files = [robot.folder / f"leg{n}.mcap" for n in range(2)]
    robot.wait("recordings", lambda: all(file.exists() and file.stat().st_size > 20_000 for file in files))

    process = psutil.Process(server.pid)
    monitors[0].send_signal(signal.SIGSTOP)
    memory, begin = process.memory_info().rss, len(robot.record())
    robot.wait("10 s of control periods", lambda: periods(robot.record()[begin:]) > 500)
    assert set(robot.record()[begin:]) <= {POLICY, "observe good"}  # no fault, and so no safe action
    assert process.memory_info().rss - memory < 4e6
    monitors[0].send_signal(signal.SIGCONT)
    count = len(robot.lines("monitor0.log"))
    robot.wait("reports after the pause", lambda: len(robot.lines("monitor0.log")) > count + 2)
    assert robot.lines("monitor0.log")[-1]["unreadable"] == 0
    assert robot.lines("monitor0.log")[-1]["states"]["policy"] == "active"

    monitors[1].kill()
    for other in (monitors[0], monitors[2], *echoes, *recorders):
        other.send_signal(signal.SIGINT)
    for other in (monitors[0], monitors[2], *echoes, *recorders):
        assert other.wait(120) in (0, 130)
    left = {path.name for path in robot.folder.iterdir() if path.is_socket()}
    assert len(left - {"policy"}) == 1
    again = robot.watch("again.log", "monitor", "--json", "--every", "0.2")
    robot.wait("a report of a new monitor after the kill", lambda: robot.sees_both("again.log"))
    again.send_signal(signal.SIGINT)
    assert again.wait(120) == 130
    assert {path.name for path in robot.folder.iterdir() if path.is_socket()} <= {"policy", *left}
    for n in range(2):
        messages = [message for _, message in Session([robot.folder / f"leg{n}.mcap"]).messages(("step",))]
        numbers = [message.sequence for message in messages]  # type: ignore[attr-defined]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    # Warnings about missed deadlines do not count, because a busy machine causes them.
    lines = robot.log("server.log").splitlines()
    assert len([line for line in lines if "WARNING" in line and "realtime.missed_share" not in line]) <= 1


@pytest.mark.slow
def test_topic_hz_and_topic_info_describe_a_running_robot(robot: Watched) -> None:
    robot.configure(**PATIENT)
    robot.serve()
    robot.drive()
    robot.wait_for(POLICY)
    command = [sys.executable, "-m", "td3_robot.cli.main", "topic"]

    def ask(*words: str) -> str:
        done = subprocess.run(
            [*command, *words, "--config", "robot.yaml"], cwd=robot.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    row = json.loads(ask("hz", "action", "--seconds", "10", "--every", "10", "--json").splitlines()[-1])
    assert row["publisher"] == "policy"
    assert 5 < row["rate_hz"] < 60
    assert row["min_ms"] <= 1e3 / row["rate_hz"] <= row["max_ms"]
    facts = json.loads(ask("info", "action", "--seconds", "10", "--json"))
    assert facts["type"] == "Action"
    assert list(facts["publishers"]) == ["policy"]
    assert facts["subscribers"] == ["leg"]
    text = ask("info", "step", "--seconds", "10")
    assert "publishers: leg (" in text
    assert "subscribers: learner, policy server" in text
