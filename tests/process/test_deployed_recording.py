"""Record a deployed policy server, its driver and its operators, and replay the recording."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from td3_robot.cli.main import main
from td3_robot.messages import Command, Start, Weights
from td3_robot.recording.reader import Session
from td3_robot.replay import check as replay
from td3_robot.topics import TOPICS
from tests.process.deployed_robot import PATIENT, POLICY, SAFE, Robot, bundle, periods


class Recorded(Robot):
    """A robot whose processes are recorded."""

    def configure(self, **safety: Any) -> None:  # type: ignore[override]
        super().configure(**safety)
        for name in ("robot", "driver"):
            path = self.folder / f"{name}.yaml"
            config = yaml.safe_load(path.read_text())
            config["endpoints"]["recorder"] = f"ipc://{self.folder}/recorder"
            config["record"] = True  # so a node keeps its first messages until the recorder connects
            path.write_text(yaml.safe_dump(config))

    def recorder(self, name: str = "leg.mcap") -> Any:
        process = self._start("recorder.log", "-m", "td3_robot.cli.main", "record", name, "--config", "robot.yaml")
        self.wait("the recorder", lambda: "recording into" in self.log("recorder.log"))
        return process


@pytest.fixture
def robot(tmp_path: Path) -> Any:
    made = Recorded(tmp_path)
    yield made
    made.end()


def stop(*processes: Any) -> None:
    for process in processes:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def test_a_deployed_robot_is_recorded_from_its_start_and_the_recording_replays(robot: Recorded, capsys: Any) -> None:
    """The recording has two emergency stops, a new policy and a fault. Replay gives the same states and replies."""
    robot.configure(**PATIENT)
    server, recorder, driver = robot.serve(), robot.recorder(), robot.drive()
    at = robot.wait_for(POLICY)
    for words in (("estop", "--reason", "smoke"), ("reset",), ("activate",), ("estop", "--target", "leg")):
        assert robot.operator(*words).returncode == 0, words
    assert robot.operator("activate", "--target", "leg").returncode == 1
    for words in (("reset", "--target", "leg"), ("activate", "--target", "leg")):
        assert robot.operator(*words).returncode == 0, words
    at = robot.wait_for(POLICY, robot.wait_for(SAFE, at))
    bundle(0.25, 4).save(robot.folder / "second.safetensors")
    assert robot.operator("load", "second.safetensors").returncode == 0
    at = robot.wait_for("apply 0.250000", at)
    robot.fault("nan")
    at = robot.wait_for(SAFE, robot.wait_for("observe nan", at))
    # A node sends its recorded messages every 0.1 s, and 12 control periods of 20 ms take 0.24 s. After this wait, the
    # recorder has the messages about the fault.
    robot.wait("12 control periods", lambda: periods(robot.record()[at:]) > 12)
    stop(driver, server, recorder)

    path = robot.folder / "leg.mcap"
    session = Session([path])
    messages = [message for _, message in session.messages()]
    assert [item.version for item in messages if isinstance(item, Weights)] == [3, 4]
    assert {item.role for item in messages if isinstance(item, Start)} == {"policy", "driver"}
    verbs = [item.verb for item in messages if isinstance(item, Command) and item.reason]
    assert verbs[0] == "estop"  # the operator's first command
    topics = {message.NAME for message in messages}
    assert topics <= {topic.message.NAME for topic in TOPICS if topic.recorded != "no"}
    assert {"start", "turn", "command", "reply", "lifecycle", "weights", "action", "step"} <= topics
    assert {"heard", "told", "latches"} <= topics
    reports = {report.core: report for report in replay.check(session)}
    text = replay.text(session, list(reports.values()))
    for core, wanted in (
        ("policy", {"action", "lifecycle", "reply", "command", "latches"}),
        ("driver", {"step", "lifecycle", "reply", "heard", "told"}),
    ):
        assert reports[core].same, text
        assert not reports[core].notes, text
        assert {comparison.topic for comparison, _ in reports[core].comparisons} == wanted, text
    assert main(["replay", str(path)]) == 0
    assert "; driver (" in capsys.readouterr().out


def test_the_recording_of_killed_processes_can_be_replayed(robot: Recorded) -> None:
    """A killed process does not record its last messages. The receiver of these messages records them."""
    robot.configure()
    server, recorder, driver = robot.serve(), robot.recorder(), robot.drive()
    at = robot.wait_for(POLICY)
    server.kill()
    server.wait()
    at = robot.wait_for(SAFE, at)
    server = robot.serve()
    robot.wait("a successful activate", lambda: robot.operator("activate", "--target", "leg").returncode == 0)
    robot.wait_for(POLICY, at)
    driver.kill()
    driver.wait()
    robot.wait("the server to forget the driver", lambda: '"connected": []' in robot.operator("state", "--json").stdout)
    stop(server, recorder)

    reports = {report.core: report for report in replay.check(Session([robot.folder / "leg.mcap"]))}
    for core in ("policy", "driver"):
        assert reports[core].same
        assert not [note for note in reports[core].notes if "is not recorded" in note], reports[core].notes


def test_a_recorder_that_starts_late_gets_the_policy_but_replay_checks_only_actions(robot: Recorded) -> None:
    robot.configure(**PATIENT)
    for name in ("robot", "driver"):
        robot.add(name, record=False)
    server, driver = robot.serve(), robot.drive()
    robot.wait_for(POLICY)
    recorder = robot.recorder()
    robot.wait("a recording of about one second", lambda: (robot.folder / "leg.mcap").stat().st_size > 50_000)
    stop(recorder, driver, server)
    session = Session([robot.folder / "leg.mcap"])
    reports = {report.core: report for report in replay.check(session)}
    (comparison, _), *others = reports["policy"].comparisons
    assert (comparison.topic, comparison.same, others) == ("action", True, [])
    assert comparison.compared > 10
    assert any("its turns before" in note for note in reports["policy"].notes)
    assert any("its turns before" in note for note in reports["driver"].notes)


def test_the_record_command_reports_a_missing_argument_or_key(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "robot.yaml"
    config.write_text(yaml.safe_dump({"seed": 1}))
    for words, error in (
        ((), "give either --run DIR (to join a run) or --config FILE"),
        (("--config", str(config)), "--config needs OUT.mcap, the file to write"),
        ((str(tmp_path / "a.mcap"), "--config", str(config)), "endpoints.recorder is not set"),
        ((str(tmp_path / "a.mcap"),), "give either --run DIR (to join a run) or --config FILE"),
    ):
        assert main(["record", *words]) == 2
        assert error in capsys.readouterr().err
    assert not (tmp_path / "a.mcap").exists()
