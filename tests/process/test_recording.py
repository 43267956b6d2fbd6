"""Record real runs, and check that each recording is complete.

No process waits for the recorder. If the recorder crashes, the other processes continue.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.cli.main import main
from td3_robot.errors import SessionError
from td3_robot.learner.training import Training
from td3_robot.messages import Status, Step
from td3_robot.recording.info import examine
from td3_robot.recording.reader import Session
from td3_robot.recording.recover import EXIT_LOST
from td3_robot.replay import check as replay
from td3_robot.runtime import process
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Node
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ClientLink, hello


def topics(path: Path) -> dict[str, Any]:
    """The topics of a file that the recorder still writes."""
    with contextlib.suppress(SessionError):  # the file has no content yet
        return dict(examine(path)["topics"])
    return {}


@pytest.mark.slow
def test_recorded_training_is_complete_and_replays(train: Any, tmp_path: Path, capsys: Any) -> None:
    """The file holds every Step and Action that the processes counted. Replay gives the same outputs for every core."""
    run = train(1000, "record=true", "robots=2", "learner.publish_every=50", options=("--lockstep",))
    run.wait_for("^ready: recorder, learner, policy, sim-0$")
    assert run.finish() == 0, run.output()
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    file = tmp_path / "run" / "session.mcap"
    report = examine(file)
    assert report["damages"] == []
    streams = report["topics"]
    assert streams["sim-0/step"]["count"] == final["sim-0"]["counters"]["steps"]
    assert streams["policy/action"]["count"] == final["policy"]["counters"]["actions"]
    assert sum(stream["missing"] + stream["begins_at"] for stream in streams.values()) == 0
    assert not any("not_recorded" in row["counters"] for row in final.values())
    assert {"learner/weights", "learner/throttle", "learner/status", "sim-0/hello", "sim-0/bye"} <= streams.keys()
    assert report["policy_versions"]["count"] == report["policy_versions"]["recorded"][1]  # all versions from 1 on
    assert Session([file]).config().timing == "lockstep"
    assert main(["replay", str(file)]) == 0
    checked = capsys.readouterr().out
    assert ", 1 loss statistics" in checked  # the learner reports one per 1,000 steps
    run = train(
        300,
        "robots=2",
        "record=true",
        options=("--lockstep", "--from", "run/session.mcap", "--offline", "1100"),
        out="second",
    )
    assert run.finish() == 0, run.output()
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    offline = [(line["updates"], line["env_steps"]) for line in lines if line["kind"] == "offline"]
    assert offline == [(1000, 0), (1100, 0)]
    assert main(["replay", str(tmp_path / "second" / "session.mcap")]) == 0
    assert "the learner began with transitions of other recordings" in capsys.readouterr().out
    final = json.loads((tmp_path / "second" / "final.json").read_text())
    # One Step of two robots adds at most two environment steps.
    assert 300 <= final["learner"]["figures"]["env_steps"] <= 301


@pytest.mark.slow
def test_replay_is_complete_when_the_recording_leaves_out_policies(train: Any, tmp_path: Path, capsys: Any) -> None:
    """The replayed learner computes every policy. Replay compares every Action, and the hash of every policy."""
    sets = ("record.enabled=true", "record.weights_every=8", "robots=2", "learner.publish_every=20")
    run = train(600, *sets, options=("--lockstep",))
    assert run.finish() == 0, run.output()
    file = tmp_path / "run" / "session.mcap"
    report = examine(file)
    assert report["damages"] == []
    versions = report["policy_versions"]
    total = versions["count"] + versions["left_out"]
    assert versions["recorded"][0] == 1
    assert versions["count"] == 1 + total // 8
    assert main(["replay", str(file), "--json"]) == 0
    cores = json.loads(capsys.readouterr().out)["sessions"][0]["cores"]
    assert next(iter(cores)) == "learner"
    compared = {name: {item["topic"]: item["compared"] for item in core["topics"]} for name, core in cores.items()}
    assert compared["learner"]["weights"] == total
    assert compared["policy"]["action"] == report["topics"]["policy/action"]["count"]
    assert cores["policy"]["not_checked"] == []
    assert main(["replay", str(file), "--core", "policy"]) == 0
    output = capsys.readouterr().out
    assert "is not recorded" in output
    assert "Actions: their weights are not recorded" in output


@pytest.mark.slow
def test_sigkill_of_the_recorder_loses_at_most_the_last_second(train: Any, tmp_path: Path, capsys: Any) -> None:
    """The recorder writes a chunk every 0.5 s (tests/recording/test_files.py). Only the last chunk is lost."""
    run = train(100_000, "record.enabled=true", "record.weights_every=1", "learner.replay_ratio=0.1")
    killed, second = tmp_path / "run" / "session.mcap", tmp_path / "run" / "session_1.mcap"
    made = run.wait_for_steps(1000)
    run.until("the steps", lambda: topics(killed).get("sim-0/step", {"count": 0})["count"] > made)
    run.children()["recorder"].send_signal(signal.SIGSTOP)
    run.wait_for_more_steps(1000)  # a stopped recorder blocks no node
    run.children()["recorder"].send_signal(signal.SIGKILL)
    run.wait_for("^recorder was killed by SIGKILL; starting it again$")
    wanted = {"sim-0/hello", "learner/weights", "sim-0/step", "policy/action"}
    run.until("records of all nodes", lambda: wanted <= topics(second).keys())
    run.wait_for_more_steps(1000)
    run.interrupt()
    assert run.finish() == 130, run.output()
    last = json.loads((tmp_path / "run" / "final.json").read_text())
    assert last["learner"]["counters"]["missed"] == 0
    assert main(["recover", str(killed)]) == EXIT_LOST
    capsys.readouterr()
    recovered = list(Session([killed.with_name("session.recovered.mcap")]).messages((Step.NAME,)))
    assert [message.sequence for _, message in recovered] == list(range(len(recovered)))
    assert len(recovered) >= made
    # The new recorder gets every node's Hello and records to the end.
    assert main(["info", str(second), "--check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert wanted <= report["topics"].keys()
    (action,) = (stream for name, stream in report["topics"].items() if name == "policy/action")
    assert action["begins_at"] > 0
    assert main(["replay", str(second), "--core", "policy"]) == 0


@pytest.mark.slow
def test_replay_of_a_killed_learner_ends_at_the_kill(train: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run = train(100_000, "record=true", "learner.replay_ratio=0.1", "learner.publish_every=20", "checkpoint.every=700")
    run.wait_for_steps(1000)
    run.children()["learner"].send_signal(signal.SIGKILL)
    log = tmp_path / "run" / "logs" / "learner.log"
    run.until("a log line about the checkpoint", lambda: "continues from checkpoint-" in log.read_text())
    run.wait_for_more_steps(300)
    run.interrupt()
    assert run.finish() == 130, run.output()
    session = Session([tmp_path / "run" / "session.mcap"])
    (report,) = replay.check(session, ["learner"])
    compared = {comparison.topic: comparison.compared for comparison, _ in report.comparisons}
    assert report.same, report
    assert compared.keys() == {"weights", "throttle", "status"}
    # The checkpoint comes at step 700 or later, and learning starts at step 500. So the learner has made at least
    # (700 - 500) · 0.1 = 20 updates, and has published the initial weights and one more version.
    assert compared["weights"] >= 2
    assert compared["status"] == 1
    why = "the learner continued from a checkpoint or a replay file, which the recording does not contain"
    # One note is about the learned results, the other is about the learner's counters.
    assert sum(why in note for note in report.notes) == 2
    update = Training.update
    # With another learning rate, replay must find other weights.
    monkeypatch.setattr(Training, "update", lambda self, _: update(self, 0.9e-3))
    (report,) = replay.check(session, ["learner"])
    assert {comparison.topic for comparison, _ in report.comparisons if not comparison.same} == {"weights"}


def test_ring_recording_is_written_when_a_simulator_is_killed(train: Any, tmp_path: Path) -> None:
    run = train(200_000, "record.enabled=true", "record.ring_s=60", "learner.replay_ratio=0.05")
    run.wait_for_steps(300)
    run.children()["sim-0"].send_signal(signal.SIGKILL)
    run.wait_for("^sim-0 was killed by SIGKILL; starting it again$")
    file = tmp_path / "run" / "session.mcap"
    log = tmp_path / "run" / "logs" / "recorder.log"
    run.until("the recording", lambda: " sim-0: " in log.read_text())
    run.wait_for_more_steps(1000)  # sim-0 is back
    run.interrupt()
    assert run.finish() == 130, run.output()
    # The recorder writes a file only if a node is silent or replaced. On a busy machine, several nodes can be silent.
    written = re.findall(r"wrote the last 60 s to run/(\S+): ([\w-]+): (?:silent for|replaced by)", log.read_text())
    assert sorted(item.name for item in file.parent.glob("session*.mcap")) == sorted(name for name, _ in written)
    file = file.with_name(next(name for name, node in written if node == "sim-0"))
    assert examine(file)["damages"] == []
    steps = [m for _, m in Session([file]).messages((Step.NAME,)) if isinstance(m, Step)]
    assert {step.incarnation for step in steps} >= {0}  # Steps of the killed simulator
    assert max(step.sequence for step in steps if step.incarnation == 0) > 200


def test_recorder_joins_and_leaves_a_running_training(
    train: Any, command: Callable[..., Any], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """A user starts and stops the recorder. The training is not configured to record."""
    run = train(200_000, "learner.replay_ratio=0.05")
    run.wait_for_steps(300)
    (tmp_path / "notes.txt").write_text("left knee oiled")
    recorder = command("record", "by-hand.mcap", "--run", "run", "--attach", "notes.txt", "--weights-every", "1")
    recorder.wait_for("recording")
    recorded = tmp_path / "by-hand.mcap"

    def complete() -> bool:
        found = topics(recorded)
        named = {"sim-0/step", "policy/action", "learner/weights"} <= found.keys()
        return named and found["sim-0/step"]["count"] > 100

    run.until("a recording of all nodes", complete)
    recorder.interrupt()
    assert recorder.finish() == 130, recorder.output()
    run.interrupt()
    assert run.finish() == 130
    report = examine(tmp_path / "by-hand.mcap")
    assert report["damages"] == []
    # The first attachment is the configuration.
    assert report["attachments"][1:] == [{"name": "notes.txt", "bytes": 15}]
    assert report["topics"]["sim-0/step"]["begins_at"] > 0
    assert report["topics"]["sim-0/step"]["count"] > 100
    assert main(["replay", str(tmp_path / "by-hand.mcap"), "--core", "policy"]) == 0
    # Without this line, main() would change the signal handler, and later tests would ignore Ctrl-C.
    monkeypatch.setattr(process, "_catch_signals", lambda _: None)
    for arguments, words in (
        ((str(tmp_path / "by-hand.mcap"), "--run", "run"), "exists already"),
        ((str(tmp_path / "no" / "x.mcap"), "--run", "run"), "does not exist"),
        (("x.mcap", "--run", "run", "--ring-s", "-1"), "--ring-s is -1; allowed: 0 or more"),
        (("x.mcap", "--run", "run", "--attach", "no-such-file"), "--attach"),
    ):
        assert main(["record", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_messages_sent_before_ctrl_c_are_recorded(command: Callable[..., Any], tmp_path: Path) -> None:
    """Nodes send records every 0.1 s, and the recorder polls every 0.1 s. So some records arrive after Ctrl-C."""
    endpoint = f"ipc://{tmp_path}/recorder"
    (tmp_path / "robot.yaml").write_text(f"task: walker2d\nendpoints: {{recorder: '{endpoint}'}}\n")
    recorder = command("record", "leg.mcap", "--config", "robot.yaml")
    recorder.wait_for("recording into")
    bus = Bus()
    try:
        client = ClientLink("recorder", hello("node", "leg", client=1), (), essential=False)
        bus.record(endpoint, client)
        deadline = time.monotonic() + 30
        while client.state != "welcome" and time.monotonic() < deadline:
            bus.receive(0.01)
        for number in range(300):
            bus.send("recorder", Status("leg", "ready", str(number), {}, {}))
            bus.receive(0.001)
        interrupted = time.monotonic()
        recorder.interrupt()
        for _ in range(3):
            bus.receive(0.05)
        late = time.monotonic() - interrupted
        for _ in range(17):
            bus.receive(0.05)
        assert recorder.finish() == 130, recorder.output()
    finally:
        bus.close()
    sequences = [entry.sequence for entry in Session([tmp_path / "leg.mcap"]).entries(("status",))]
    assert sequences == list(range(len(sequences)))
    # The recorder waits only 0.5 s for records in transit. If this test was late, the recording may lack some records.
    assert len(sequences) == 300 or late > 0.4


@pytest.mark.parametrize("ring", [(), ("--ring-s", "30")], ids=["all", "ring"])
def test_last_messages_of_a_crashed_node_are_recorded(
    ring: tuple[str, ...],
    tmp_path: Path,
    command: Callable[..., Any],
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a node ends with an unexpected exception, it sends its remaining records and a Status with the exception.

    A recorder with a ring writes its file when it receives this Status.
    """
    endpoint = f"ipc://{tmp_path}/recorder"
    (tmp_path / "robot.yaml").write_text(f"task: walker2d\nrecord: true\nendpoints: {{recorder: '{endpoint}'}}\n")
    recorder = command("record", "leg.mcap", "--config", "robot.yaml", *ring)
    recorder.wait_for("recording into|keeping the last")
    monkeypatch.setattr(process, "_catch_signals", lambda _: None)

    def body(node: Node) -> None:
        (tap,) = node.bus._taps
        deadline = time.monotonic() + 30
        while tap._session.state != "welcome" and time.monotonic() < deadline:
            node.bus.receive(0.01)
        for number in range(5):
            node.bus.send("recorder", Status("leg", "ready", str(number), {}, {}))
            node.bus.receive(0.0)
        raise ZeroDivisionError("a mistake")

    arguments = node_parser("", "leg", "", deployable=True).parse_args(["--config", str(tmp_path / "robot.yaml")])
    assert process.run_node("policy", arguments, body) == 1
    assert capsys.readouterr().err.rstrip().endswith("ZeroDivisionError: a mistake")
    if ring:
        recorder.wait_for(r"wrote the last 30 s to .*leg\.mcap: leg failed: ZeroDivisionError: a mistake$")
    recorder.interrupt()
    assert recorder.finish() == 130, recorder.output()
    messages = [message for _, message in Session([tmp_path / "leg.mcap"]).messages(("status",))]
    messages = [message for message in messages if message.detail]  # leave out the node's regular reports
    assert [message.detail for message in messages] == ["0", "1", "2", "3", "4", "ZeroDivisionError: a mistake"]
    assert messages[-1].state == "failed"
