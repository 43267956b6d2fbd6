"""The current version reads the files of version 0.1.0: runs, recordings, policies, state files and keys.

``v0_1_0/README.md`` describes how the files were made. A command that changes files runs on a copy of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from mcap.reader import make_reader

from td3_robot.bundle import Bundle
from td3_robot.policy.actor import Actor
from td3_robot.recording.entries import Facts
from td3_robot.recording.reader import Session
from td3_robot.recording.writer import write
from tests.conftest import Command
from tests.process.deployed_robot import SAFE, Robot, periods

FROZEN = Path(__file__).parent / "v0_1_0"
EXPECTED: dict[str, Any] = json.loads((FROZEN / "expected.json").read_text())
RECORDINGS = {
    "lockstep": "runs/lockstep/session.mcap",
    "walkers": "runs/walkers/session.mcap",
    "free": "runs/free/session.mcap",
    "deployed": "deployed/deployed.mcap",
}
PATIENT = ("--set", "safety.observation_deadline_ms=60000")
"""A long deadline, for tests that do not test the deadline.

On a busy machine, a driver may miss the 1 s deadline of robot.yaml.
"""
Start = Callable[..., Command]


@pytest.fixture(autouse=True)
def frozen(tmp_path: Path) -> Iterator[Path]:
    """Copy the frozen files to the folder of the test, because the tracked files must not change."""
    before = digests()
    copy = tmp_path / "v0_1_0"
    shutil.copytree(FROZEN, copy)
    for secret in copy.glob("keys/*/identity.secret"):
        secret.chmod(0o600)  # git does not store file mode 0600
    yield copy
    assert digests() == before


def digests() -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in FROZEN.rglob("*") if path.is_file()}


def finish(started: Command) -> str:
    """Wait for the command to succeed.

    Returns:
        Its output.
    """
    code = started.finish()
    assert code == 0, started.output()
    return started.output()


@cache
def replayed(name: str) -> dict[str, Any]:
    """Replay a recording and check that nothing differs. Return the report of ``replay --json`` for each core."""
    command = [sys.executable, "-m", "td3_robot.cli.main", "replay", "--json", str(FROZEN / RECORDINGS[name])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cores: dict[str, Any] = json.loads(done.stdout)["sessions"][0]["cores"]
    return cores


def other_machine() -> bool:
    """Return whether another kind of machine made the files. If so, learning differs in the last bits."""
    return any("same kind of machine" in note for note in replayed("lockstep")["learner"]["not_checked"])


def same_policy(path: Path, expected: Path) -> bool:
    ours, theirs = (safetensors.numpy.load_file(file) for file in (path, expected))
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "steps", "updates", "end"),
    [
        pytest.param("lockstep", 400, 300, 600, marks=pytest.mark.slow),
        pytest.param("walkers", 302, 242, 500, marks=pytest.mark.slow),
        ("free", 200, 140, 300),
        ("killed", 170, 9, 190),
    ],
)
def test_run_is_resumed(name: str, steps: int, updates: int, end: int, frozen: Path, command: Start) -> None:
    """A run continues from its checkpoint. The run ``killed`` also has 20 newer steps in its journal.

    On the kind of machine that made the files, a resumed lock-step run ends with the same policy as in version 0.1.0,
    bit for bit.
    """
    run = frozen / "runs" / name
    finish(command("train", "--resume", str(run), "--steps", str(end)))
    figures = json.loads((run / "final.json").read_text())["learner"]["figures"]
    [checkpoint] = (FROZEN / "runs" / name / "checkpoint").iterdir()
    assert checkpoint.name in (run / "logs" / "learner.log").read_text()
    assert figures["began_at"] == steps
    assert figures["env_steps"] >= end
    assert figures["updates"] > updates
    assert (run / "metrics.jsonl").read_bytes().startswith((FROZEN / "runs" / name / "metrics.jsonl").read_bytes())
    expected = FROZEN / "expected" / f"{name}.safetensors"
    if expected.exists() and not other_machine():
        assert same_policy(run / "policy.safetensors", expected)


def test_a_run_of_a2c_is_not_resumed(frozen: Path, command: Start) -> None:
    """In version 0.1.0 a separate program trained A2C. Its policies still work, but its checkpoints do not."""
    run = frozen / "runs" / "a2c"
    refused = command("train", "--resume", str(run), "--set", "a2c.episodes=40")
    assert refused.finish() == 2
    [line] = refused.lines
    assert "checkpoint-000000000191.safetensors comes from A2C in version 0.1.0" in line
    evaluated = finish(command("eval", str(run / "policy.safetensors"), "--episodes", "2", "--json"))
    assert json.loads(evaluated.splitlines()[-1])["provenance"]["algorithm"] == "A2C"


@pytest.mark.parametrize("name", RECORDINGS)
def test_recording_is_read(name: str, frozen: Path, command: Start) -> None:
    """No message is damaged or unknown, and the exported tables have as many rows as in version 0.1.0."""
    path = str(frozen / RECORDINGS[name])
    finish(command("info", path, "--check"))
    rows = json.loads(finish(command("export", path, "--out", "tables", "--json")))
    assert rows == EXPECTED["rows"][name]


@pytest.mark.parametrize(
    ("name", "core"), [(name, core) for name, cores in EXPECTED["compared"].items() for core in cores]
)
def test_recording_is_replayed(name: str, core: str) -> None:
    """For each topic, replay compares as many messages as in version 0.1.0. No message differs from the recording."""
    if core == "learner" and other_machine():
        pytest.skip("a learner is reproducible only on the same kind of machine")
    compared = {item["topic"]: item["compared"] for item in replayed(name)[core]["topics"]}
    assert compared == EXPECTED["compared"][name][core]


@pytest.mark.parametrize("name", RECORDINGS)
def test_truncated_recording_is_recovered(name: str, frozen: Path, command: Start) -> None:
    """If the index is cut, no message is lost. If the last chunk is cut, only the newest messages are lost."""
    path = frozen / RECORDINGS[name]
    before, octets = list(Session([path]).entries()), path.read_bytes()
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    last = max(summary.chunk_indexes, key=lambda chunk: chunk.chunk_start_offset)
    for cut, code in ((len(octets) - 20, 0), (last.chunk_start_offset + last.chunk_length // 2, 3)):
        damaged, mended = frozen / "damaged.mcap", frozen / f"mended-{code}.mcap"
        damaged.write_bytes(octets[:cut])
        assert command("recover", str(damaged), "--out", str(mended)).finish() == code
        finish(command("info", str(mended), "--check"))
        after = list(Session([mended]).entries())
        assert 0 < len(after) <= len(before)
        assert (len(after) == len(before)) == (code == 0)
        assert after == before[: len(after)]


def test_parts_form_one_recording_and_other_recordings_are_refused(frozen: Path, command: Start) -> None:
    """The second part repeats the Hellos and Starts, and overlaps the first part by five messages."""
    path, other = frozen / RECORDINGS["lockstep"], frozen / RECORDINGS["free"]
    entries, half = list(Session([path]).entries()), 800
    again = [entry for entry in entries[:half] if entry.topic in ("hello", "start")]
    facts = Facts(Session([path]).metadata, [*Session([path]).attachments.values()])
    parts = [frozen / "first.mcap", frozen / "second.mcap"]
    write(parts[0], facts, entries[:half])
    since = entries[half - 5].received
    write(parts[1], facts, [*(replace(entry, received=since) for entry in again), *entries[half - 5 :]])
    assert list(Session(parts).entries()) == entries
    refused = command("export", str(path), str(other), "--out", str(frozen / "tables"))
    assert refused.finish() == 2
    assert "come from different recordings" in refused.output()


@pytest.mark.slow
def test_training_starts_from_a_recording(frozen: Path, command: Start) -> None:
    sets = ("network.hidden=[8]", "learner.batch_size=16", "learner.learning_starts=20", "learner.compile=false")
    options = [word for item in (*sets, "evaluation.every=0") for word in ("--set", item)]
    path = str(frozen / RECORDINGS["lockstep"])
    words = ("--steps", "50", "--from", path, "--offline", "20", "--out", "run", *options)
    finish(command("train", "pendulum", *words))
    lines = (frozen.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line)["kind"] == "offline" for line in lines)


def test_policies_give_the_actions_of_version_0_1_0(frozen: Path) -> None:
    for name, values in EXPECTED["actions"].items():
        actor = Actor(Bundle.load(frozen / name))
        actions = actor(np.array(values["observations"], np.float32))
        np.testing.assert_allclose(actions, values["actions"], rtol=0, atol=1e-6, err_msg=name)


def test_bundles_are_verified_and_evaluated(frozen: Path, command: Start) -> None:
    for path in (*frozen.glob("runs/*/policy.safetensors"), *frozen.glob("deployed/*.safetensors")):
        finish(command("bundle", "verify", str(path)))
    output = finish(command("eval", str(frozen / "runs/lockstep/policy.safetensors"), "--episodes", "2", "--json"))
    assert json.loads(output)["returns"] == pytest.approx(EXPECTED["returns"], rel=1e-3)


@pytest.fixture
def robot(frozen: Path, tmp_path: Path) -> Iterator[Robot]:
    """The deployed robot with its policy and its configuration, without a state file."""
    folder = tmp_path / "robot"
    folder.mkdir()
    it = Robot(folder)
    for source, target in (("policy.safetensors",) * 2, ("robot.yaml",) * 2, ("robot.yaml", "driver.yaml")):
        shutil.copy(frozen / "deployed" / source, folder / target)
    yield it
    it.end()


def keep(robot: Robot, frozen: Path, name: str) -> Path:
    """Give the robot's policy server a state file of version 0.1.0."""
    target = robot.folder / "policy.safetensors.state"
    shutil.copy(frozen / "deployed" / name, target)
    return target


def state(robot: Robot, *words: str) -> dict[str, Any]:
    done = robot.operator("state", "--json", *words)
    assert done.returncode in (0, 1), done.stderr  # 1: something is stopped or in FAULT
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def watch(robot: Robot) -> dict[str, str]:
    """Wait until the robot is connected, and return its entry in the server's state."""

    def ready() -> Any:
        answer = state(robot)  # a new watch begins at the robot's first Step
        return answer["connected"] == ["leg"] and "leg" in answer["sources"] and answer

    found = robot.wait("the robot", ready)
    entry: dict[str, str] = found["sources"]["leg"]
    return entry


def test_policy_is_served(robot: Robot) -> None:
    robot.serve(*PATIENT)
    found = state(robot)
    assert (found["state"], found["version"], found["frozen"], found["robot"]) == ("active", 3, False, "Pendulum")
    robot.drive()
    assert watch(robot)["watch"] == "active"
    robot.wait("an action of the policy", lambda: actions(robot) - {SAFE})


def actions(robot: Robot) -> set[str]:
    return {line for line in robot.record() if line.startswith("apply")}


def test_a_state_file_of_version_0_1_0_keeps_the_emergency_stop_and_the_freeze(robot: Robot, frozen: Path) -> None:
    """The server starts in the emergency stop. ``reset`` ends the stop, then ``activate`` lets the policy act.

    The freeze remains. The state file still names the policy that a rollback withdrew.
    """
    path = keep(robot, frozen, "stopped.safetensors.state")
    before = json.loads(path.read_bytes())
    server = robot.serve()
    found = state(robot)
    assert (found["state"], found["reason"]) == ("fault", "emergency stop: a leg is loose")
    assert found["frozen"]
    assert robot.operator("activate").returncode == 1
    for verb, after in (("reset", "inactive"), ("activate", "active")):
        assert robot.operator(verb).returncode == 0
        assert state(robot)["state"] == after
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 130
    kept = json.loads(path.read_bytes())
    assert kept.pop("owner").startswith("policy of ")  # version 0.1.0 wrote no owner; this server now owns the file
    assert kept == {**before, "stop": ""}
    robot.serve()
    assert state(robot)["frozen"]


def test_a_state_file_of_version_0_1_0_keeps_one_robot_stopped(robot: Robot, frozen: Path) -> None:
    """The robot stays stopped, and the server stays inactive, until an operator ends both states."""
    keep(robot, frozen, "robot_stopped.safetensors.state")
    robot.serve(*PATIENT)
    found = state(robot)
    assert (found["state"], found["frozen"], found["stopped"]) == ("inactive", True, ["leg"])
    robot.drive()
    assert watch(robot)["watch"] == "fault"
    assert robot.operator("activate").returncode == 1
    for words in (("reset", "--target", "leg"), ("activate",)):
        assert robot.operator(*words).returncode == 0
    found = state(robot)
    assert (found["state"], found["stopped"], found["sources"]["leg"]["watch"]) == ("active", [], "active")


def test_fault_saved_by_version_0_1_0_stays_in_force(robot: Robot, frozen: Path) -> None:
    """The server sends only the safe action until an operator activates the robot."""
    keep(robot, frozen, "fault.safetensors.state")
    robot.serve(*PATIENT)
    robot.drive()
    assert watch(robot)["watch"] == "fault"
    begin = len(robot.record())
    robot.wait("half a second", lambda: periods(robot.record()[begin:]) > 25)  # periods of 20 ms
    assert actions(robot) == {SAFE}
    assert robot.operator("activate", "--target", "leg").returncode == 0
    assert watch(robot)["watch"] == "active"
    robot.wait("an action of the policy", lambda: actions(robot) - {SAFE})


def test_operator_connects_with_keys_of_version_0_1_0(robot: Robot, frozen: Path, command: Start) -> None:
    """Server and operator use CURVE with the key folders of version 0.1.0. An operator without a key gets no answer."""
    listed = json.loads(finish(command("keys", "list", "--keys", str(frozen / "keys" / "robot-7"), "--json")))
    assert {**listed, "folder": ""} == EXPECTED["keys"]
    keys = f"endpoints.keys={frozen / 'keys' / 'robot-7'}"
    robot.serve("--set", "endpoints.policy=tcp://127.0.0.1:*", "--set", keys)
    endpoint = robot.wait("the port", lambda: re.search(r"tcp://127\.0\.0\.1:\d+", robot.log("server.log")))[0]
    operator = ("node", "state", "--endpoint", endpoint, "--json", "--timeout")
    keys_of_operator = ("--keys", str(frozen / "keys" / "workstation"))
    assert json.loads(finish(command(*operator, "60", *keys_of_operator)))["version"] == 3
    assert command(*operator, "1").finish() == 1


def test_frozen_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in FROZEN.rglob("*") if path.is_file()) < 1_500_000
