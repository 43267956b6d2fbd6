"""Recording a deployed policy server, its driver and its operators: all of it is in the file, and is done again."""

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
from tests.process.test_faults import PATIENT, POLICY, SAFE, Robot, bundle, periods


class Recorded(Robot):
    """A robot with a recorder beside it."""

    def configure(self, **safety: Any) -> None:  # type: ignore[override]
        super().configure(**safety)
        for name in ("robot", "driver"):
            path = self.folder / f"{name}.yaml"
            config = yaml.safe_load(path.read_text())
            config["endpoints"]["recorder"] = f"ipc://{self.folder}/recorder"
            config["record"] = True  # so that the beginning waits for the recorder, whoever starts first
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


def test_a_deployed_robot_is_recorded_from_its_beginning_and_replayed(robot: Recorded, capsys: Any) -> None:
    """An emergency stop for all and one by name, a second policy, a fault: every state and answer again."""
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
    robot.wait("a quarter of a second", lambda: periods(robot.record()[at:]) > 12)  # messages are gathered for 0.1 s
    stop(driver, server, recorder)

    path = robot.folder / "leg.mcap"
    session = Session([path])
    said = [message for _, message in session.messages()]
    assert [item.version for item in said if isinstance(item, Weights)] == [3, 4]
    assert {item.role for item in said if isinstance(item, Start)} == {"policy", "driver"}
    verbs = [item.verb for item in said if isinstance(item, Command) and item.reason]
    assert verbs[0] == "estop"  # as the operator said it: there was one to say
    topics = {message.NAME for message in said}
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
    assert "driver: " in capsys.readouterr().out


def test_what_followed_a_kill_is_replayed(robot: Recorded) -> None:
    """What the server, and then the driver, said last was gathered and went with it; the other one had taken it."""
    robot.configure()
    server, recorder, driver = robot.serve(), robot.recorder(), robot.drive()
    at = robot.wait_for(POLICY)
    server.kill()
    server.wait()
    at = robot.wait_for(SAFE, at)
    server = robot.serve()
    robot.wait("activated", lambda: robot.operator("activate", "--target", "leg").returncode == 0)
    robot.wait_for(POLICY, at)
    driver.kill()
    driver.wait()
    robot.wait("the server's notice", lambda: "no observation for" in robot.log("server.log"))
    stop(server, recorder)

    reports = {report.core: report for report in replay.check(Session([robot.folder / "leg.mcap"]))}
    for core in ("policy", "driver"):
        assert reports[core].same
        assert not [note for note in reports[core].notes if "is not recorded" in note], reports[core].notes


def test_a_recorder_that_comes_late_gets_the_policy_and_checks_actions_alone(robot: Recorded) -> None:
    robot.configure(**PATIENT)
    for name in ("robot", "driver"):
        path = robot.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "record": False}))
    server, driver = robot.serve(), robot.drive()
    robot.wait_for(POLICY)
    recorder = robot.recorder()
    robot.wait("a recording of a second or so", lambda: (robot.folder / "leg.mcap").stat().st_size > 50_000)
    stop(recorder, driver, server)
    session = Session([robot.folder / "leg.mcap"])
    reports = {report.core: report for report in replay.check(session)}
    (comparison, _), *others = reports["policy"].comparisons
    assert (comparison.topic, comparison.same, others) == ("action", True, [])
    assert comparison.compared > 10
    assert any("its turns before" in note for note in reports["policy"].notes)
    assert any("its turns before" in note for note in reports["driver"].notes)


def test_what_a_recorder_needs_to_know_is_said(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "robot.yaml"
    config.write_text(yaml.safe_dump({"endpoints": {"policy": f"ipc://{tmp_path}/policy"}}))
    for words, error in (
        ((), "give one of --run DIR (join a run) and --config FILE"),
        (("--config", str(config)), "OUT.mcap, the file to write, is needed with --config"),
        ((str(tmp_path / "a.mcap"), "--config", str(config)), "endpoints.recorder is not set"),
        ((str(tmp_path / "a.mcap"),), "give one of --run DIR (join a run) and --config FILE"),
    ):
        assert main(["record", *words]) == 2
        assert error in capsys.readouterr().err
    assert not (tmp_path / "a.mcap").exists()
