"""Real processes: an operator takes over a driver's robot. The recording names the operator.

A replay of the recording gives the recorded outputs.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import td3_robot as tr
from td3_robot.cli.main import main
from td3_robot.messages import ActionOrigin, Phase, Step, Teleop
from td3_robot.operators import Watching
from td3_robot.recording import info
from td3_robot.recording.reader import Session
from td3_robot.recording.values import whole
from td3_robot.replay import check as replay
from td3_robot.transport.keys import CLIENT, KeyFolder
from tests.conftest import free_port
from tests.process.deployed_robot import PATIENT, POLICY, SAFE, periods, program
from tests.process.test_deployed_recording import Recorded, stop

OPERATOR = "apply 0.250000"
SILENCE = "td3_robot.operators._SILENCE"
KILLED = f"""
import sys
import td3_robot as tr
import td3_robot.operators
{SILENCE} = 60.0
robot = tr.connect(sys.argv[1], timeout=60).takeover("leg")
while True:
    robot.command([0.25])
    robot.wait()
"""


@pytest.fixture
def robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A robot whose operators do not give up if the server is silent for over 3 s, as on a busy machine."""
    monkeypatch.setattr(SILENCE, 60.0)
    made = Recorded(tmp_path)
    yield made
    made.end()


@contextmanager
def driving(takeover: tr.Takeover, torque: float) -> Iterator[None]:
    """Send the same action every period in a thread."""
    over = threading.Event()

    def drive() -> None:
        while not over.is_set():
            takeover.command([torque])
            takeover.wait()

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def configure(robot: Recorded) -> None:
    """Set an operator's deadline of 3 s. The default is 200 ms, but a busy machine can delay an operator's actions."""
    robot.configure(**PATIENT)
    robot.add("robot", policy={"operator_deadline_ms": 3000})


def test_a_process_can_watch_a_server_and_command_it_at_the_same_time(robot: Recorded) -> None:
    """Each connection of a process has its own name: the server refuses a name that another client uses."""
    robot.configure()
    robot.serve()
    operator = tr.connect(f"ipc://{robot.folder}/policy", timeout=60)
    watching = operator.watch()
    assert next(watching) is Watching.BEGUN
    assert operator.freeze().detail["frozen"]
    watching.close()


def test_a_takeover_works_with_real_processes(robot: Recorded, capsys: Any) -> None:
    configure(robot)
    server, recorder, driver = robot.serve(), robot.recorder(), robot.drive()
    endpoint = f"ipc://{robot.folder}/policy"
    at = robot.wait_for(POLICY)
    first, second = tr.connect(endpoint, timeout=60), tr.connect(endpoint, timeout=60)
    with pytest.raises(tr.Td3RobotError, match="index is -1; allowed: whole numbers from 0 to 4294967295"):
        first.takeover("leg", -1)

    with first.takeover("leg", reason="test") as leg:
        assert (leg.actions[0]["name"], leg.period_s, leg.deadline_s) == ("torque", 0.02, 3.0)
        with driving(leg, 0.25):
            at = robot.wait_for(OPERATOR, at)
            with pytest.raises(tr.CommandError, match=r"operator 'operator-.*' has taken over robot 0 of 'leg'"):
                second.takeover("leg")
            assert first.state().detail["taken_over"]
            assert robot.operator("estop", "--reason", "test").returncode == 0
            at = robot.wait_for(SAFE, at)
            assert robot.operator("reset").returncode == robot.operator("activate").returncode == 0
            at = robot.wait_for(OPERATOR, at)
        at = robot.wait_for(SAFE, at)  # the operator is silent
        with driving(leg, 0.25):
            at = robot.wait_for(OPERATOR, at)
    at = robot.wait_for(POLICY, at)  # the end of the block gives the robot back

    killed = subprocess.Popen([sys.executable, "-c", KILLED, endpoint], text=True)
    robot.started.append(killed)
    at = robot.wait_for(OPERATOR, at)
    killed.kill()
    at = robot.wait_for(SAFE, at)
    robot.wait("half a second", lambda: periods(robot.record()[at:]) > 25)
    assert POLICY not in robot.record()[at:]
    left = "has left; robot 0 of 'leg' gets the safe action"
    robot.wait("the server's notice", lambda: left in robot.log("server.log"))
    robot.wait("a new operator", lambda: second.takeover("leg").give_back() is None)
    at = robot.wait_for(POLICY, at)
    robot.wait("a quarter of a second of control periods", lambda: periods(robot.record()[at:]) > 12)
    stop(driver, server, recorder)

    path = robot.folder / "leg.mcap"
    session = Session([path])
    messages = [message for _, message in session.messages()]
    assert any(isinstance(item, Teleop) for item in messages)
    steps = [item for item in messages if isinstance(item, Step)]
    # On a busy machine an Action may be late. The driver then holds the newest action.
    operated = [item for item in steps if item.operated.get("0")]
    assert {ActionOrigin.OPERATOR} <= {item.origin for item in operated} <= {ActionOrigin.OPERATOR, ActionOrigin.HELD}
    assert all(item.operated["0"].startswith("operator-") and item.weights_version == 0 for item in operated)
    assert {item.action[0, 0] for item in operated} == {0.25}
    silent = [item for item in steps if item.operated == {"0": ""}]
    assert silent
    safe = {item.action[0, 0] for item in silent if item.origin == ActionOrigin.SAFE}
    assert len(safe) == 1
    assert {item.origin for item in silent} <= {ActionOrigin.SAFE, ActionOrigin.HELD}
    assert {item.action[0, 0] for item in silent} == safe
    # The first episode has no reset, and ends at the server's first answer. The second continues during the takeovers.
    assert [int(item.episode[0]) for item in steps if item.phase[0] == Phase.FIRST] == [0, 1]
    reports = replay.check(session)
    text = replay.text(session, reports)
    assert all(report.same for report in reports), text
    assert not [note for report in reports if report.core in ("policy", "driver") for note in report.notes], text
    assert info.examine(path)["operator_steps"] == len(operated)
    frame = tr.open_recording(path).to_pandas()
    origins = [item.origin for item in steps]
    assert frame["origin"].tolist() == origins
    assert whole(operated[0], {})["operated"] == operated[0].operated  # what ``topic echo`` prints
    assert main(["info", str(path)]) == 0
    assert f"steps under an operator: {len(operated)}" in capsys.readouterr().out


def test_a_takeover_needs_a_key_with_the_role_operator(robot: Recorded) -> None:
    robot.configure(**PATIENT)
    server = KeyFolder(robot.folder / "robot-keys")
    public = server.create("server").public
    for name, role in (("driver", "driver"), ("operator", "operator"), ("monitor", CLIENT)):
        folder = KeyFolder(robot.folder / f"{name}-keys")
        server.allow(name, folder.create(name).public, role)
        folder.allow("server", public, "server:policy")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    for name in ("robot", "driver"):
        robot.add(name, endpoints={"policy": endpoint, "keys": f"{name}-keys"}, record=False)
    robot.serve()
    robot.drive()
    at = robot.wait_for(POLICY)
    for name in ("driver", "monitor"):
        with pytest.raises(tr.Td3RobotError, match=r"the key of 'operator-.*' may not have role operator"):
            tr.connect(endpoint, robot.folder / f"{name}-keys", timeout=60).takeover("leg")
    with tr.connect(endpoint, robot.folder / "operator-keys", timeout=60).takeover("leg") as leg, driving(leg, 0.25):
        at = robot.wait_for(OPERATOR, at)
    robot.wait_for(POLICY, at)


def test_the_robot_of_a_failed_program_keeps_the_safe_action_after_a_server_restart(robot: Recorded) -> None:
    robot.configure(**PATIENT)
    server, recorder, _ = robot.serve(), robot.recorder(), robot.drive()
    at = robot.wait_for(POLICY)
    operator = tr.connect(f"ipc://{robot.folder}/policy", timeout=60)
    leg = operator.takeover("leg")
    with driving(leg, 0.25):
        at = robot.wait_for(OPERATOR, at)
    with pytest.raises(ZeroDivisionError), leg:
        raise ZeroDivisionError
    at = robot.wait_for(SAFE, at)
    stop(server)
    robot.serve(log="again.log")
    robot.wait("the new server's log line", lambda: "an operator had taken over leg/0" in robot.log("again.log"))
    robot.wait("the driver", lambda: operator.state().detail["connected"] == ["leg"])
    robot.wait("half a second", lambda: periods(robot.record()[at:]) > 25)
    assert POLICY not in robot.record()[at:]
    assert operator.reset(target="leg")
    robot.wait_for(POLICY, at)
    stop(recorder)


def command_line(robot: Recorded, source: Any) -> subprocess.Popen[str]:
    words = ("node", "takeover", "--target", "leg", "--config", "robot.yaml", "--timeout", "60")
    process = subprocess.Popen(
        [sys.executable, *program({SILENCE: 60}), *words],
        cwd=robot.folder,
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    robot.started.append(process)
    return process


def test_the_keyboard_drives_a_robot_and_gives_it_back(robot: Recorded) -> None:
    configure(robot)
    server, recorder, driver = robot.serve(), robot.recorder(), robot.drive()
    at = robot.wait_for(POLICY)
    keyboard, terminal = pty.openpty()
    program = command_line(robot, terminal)
    at = robot.wait_for(SAFE, at)  # the person has pressed no key
    assert program.stdout
    # Keys that are pressed before the help text appears are lost. So wait for the help text.
    assert any("up, down" in line for line in program.stdout)
    os.write(keyboard, b"\x1b[A" * 3 + b"\x1b[B")
    at = robot.wait_for("apply 0.200000", at)  # 3 times up, once down: 2/20 of the range from -1 to 1
    # 2 s after the last key, the program stops sending actions. The operator's deadline ends 3 s later.
    at = robot.wait_for(SAFE, at)
    os.write(keyboard, b"0")
    at = robot.wait_for("apply 0.000000", at)
    os.write(keyboard, b"q")
    at = robot.wait_for(POLICY, at)
    program.communicate(timeout=60)
    assert program.returncode == 0
    os.close(keyboard)
    os.close(terminal)
    stop(driver, server, recorder)


def test_lines_of_standard_input_drive_a_robot(robot: Recorded) -> None:
    configure(robot)
    server, recorder, driver = robot.serve(), robot.recorder(), robot.drive()
    at = robot.wait_for(POLICY)
    program = command_line(robot, subprocess.PIPE)
    assert program.stdin
    program.stdin.write("0.25\n")
    program.stdin.flush()
    at = robot.wait_for(OPERATOR, at)
    at = robot.wait_for(SAFE, at)  # no further line comes
    program.communicate("q\n", timeout=60)
    assert program.returncode == 0
    at = robot.wait_for(POLICY, at)

    ended = command_line(robot, subprocess.PIPE)
    ended.communicate("0.25\n", timeout=60)  # the input ends without q, as when the sending program dies
    at = robot.wait_for(SAFE, at)
    robot.wait("half a second", lambda: periods(robot.record()[at:]) > 25)
    assert POLICY not in robot.record()[at:]
    assert robot.operator("give_back", "--target", "leg").returncode == 0
    at = robot.wait_for(POLICY, at)

    silent = command_line(robot, subprocess.PIPE)
    assert silent.stdin
    silent.stdin.write("0.25\n")
    silent.stdin.flush()
    at = robot.wait_for(SAFE, robot.wait_for(OPERATOR, at))
    with tr.connect(f"ipc://{robot.folder}/policy", timeout=60).takeover("leg") as leg:
        with driving(leg, 0.25):
            at = robot.wait_for(OPERATOR, at)
            refused = r"refused: policy: you have not taken over robot 0 of 'leg'; operator 'operator-.*' has it\n$"
            silent.stdin.write("0.25\n")
            silent.stdin.flush()
            assert silent.stdout
            assert re.search(refused, silent.stdout.read())
        silent.communicate(timeout=60)
        assert silent.returncode == 1
    at = robot.wait_for(POLICY, at)

    failed = command_line(robot, subprocess.PIPE)
    assert failed.communicate("0.25 nan\n", timeout=60)[0].endswith(
        "the line '0.25 nan' is not an action; allowed: 1 finite number(s), or q\n"
    )
    assert failed.returncode == 2
    at = robot.wait_for(SAFE, at)
    assert robot.operator("give_back").returncode == 1
    assert robot.operator("give_back", "--target", "leg").returncode == 0
    robot.wait_for(POLICY, at)
    stop(driver, server, recorder)
