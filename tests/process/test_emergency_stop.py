"""The emergency stop of a deployed robot."""

from __future__ import annotations

import json
import re

import yaml

from tests.process.deployed_robot import (
    ACTS,
    AUTOMATIC,
    PATIENT,
    POLICY,
    SAFE,
    Robot,
    periods,
)


def wait_for_state_file(robot: Robot) -> None:
    """Wait until the server has written its emergency stop. The server writes the file after its Reply."""
    file = robot.folder / "policy.safetensors.state"
    robot.wait("the stop in the state file", lambda: file.exists() and json.loads(file.read_text())["stop"])


def test_the_command_line_and_the_robot_can_cause_an_emergency_stop(robot: Robot) -> None:
    robot.configure(**PATIENT, **AUTOMATIC)
    server, driver = robot.serve(), robot.drive()
    begin = robot.running()
    robot._start("watch.log", "-u", "-m", "td3_robot.cli.main", "node", "watch", "--config", "robot.yaml")
    robot.wait(
        "the start of `node watch`",
        lambda: re.search("^[-0-9]+ [0-9:]+ watching", robot.log("watch.log"), re.MULTILINE),
    )
    stop = robot.operator("estop", "--reason", "smoke", "--json")
    assert stop.returncode == 0
    assert (json.loads(stop.stdout)["confirmed"], json.loads(stop.stdout)["unconfirmed"]) == (["leg"], [])
    safe = robot.wait_for(SAFE, begin)
    for node in ("policy", "policy/leg", "leg"):
        line = f"{node}: active -> fault: emergency stop: smoke\n"
        robot.wait("a line of `node watch`", lambda line=line: line in robot.log("watch.log"))
    refused = robot.operator("activate")
    assert refused.returncode == 1
    assert "an emergency stop is in force (emergency stop: smoke); reset it first" in refused.stderr
    # The stop stays in force when the server restarts, even if the server's state file is lost.
    wait_for_state_file(robot)
    for number, file in enumerate(("kept", "lost"), 1):
        server.kill()
        server.wait()
        robot.wait("a warning of `node watch`", lambda n=number: robot.log("watch.log").count("NOT watching: ") >= n)
        if file == "lost":
            (robot.folder / "policy.safetensors.state").unlink()
        log = f"server-{file}.log"
        server = robot.serve(log=log)
        if file == "lost":
            robot.wait("the driver to join the new server", lambda log=log: ACTS in robot.log(log))
        else:
            robot.wait("the new server", lambda: '"connected": ["leg"]' in robot.operator("state", "--json").stdout)
        robot.wait("`node watch` to watch again", lambda n=number: robot.log("watch.log").count("watching again") >= n)
        still = "the emergency stop is still in force (smoke): reset, then activate (policy.safetensors.state)"
        assert (still in robot.log(log)) == (file == "kept")
        assert POLICY not in robot.record()[safe:]
    assert robot.operator("reset").returncode == 0
    assert robot.operator("activate").returncode == 0
    back = robot.wait_for(POLICY, safe)
    robot.fault("stop")
    robot.wait_for(SAFE, back)
    robot.wait("the server's stop", lambda: "emergency stop: leg: the red button" in robot.log(log))
    # SIGTERM ends both processes with exit code 143 (128 + 15). The driver's last action is the safe action.
    for process in (driver, server):
        process.terminate()
        assert process.wait(120) == 143
        if process is driver:
            assert robot.record()[-1] == SAFE
            alone = robot.operator("estop")
            assert alone.returncode == 1
            assert "no robot is connected, so no robot has confirmed the stop" in alone.stderr


def test_a_driver_that_starts_during_an_emergency_stop_resets_its_robot_only_after_an_activate(robot: Robot) -> None:
    """``reset()`` may move the robot. The driver starts with ``autostart``, so it is active before the stop arrives."""
    robot.configure(**PATIENT)
    robot.serve()
    driver = robot.drive()
    robot.running()
    assert "first reset" in robot.record()
    assert robot.operator("estop").returncode == 0
    driver.kill()
    driver.wait()
    (robot.folder / "record").unlink()
    robot.drive()
    robot.wait("50 control periods", lambda: periods(robot.record()) > 50)
    assert set(robot.record()) == {"observe good", SAFE}
    assert robot.operator("reset").returncode == 0
    again = len(robot.record())
    robot.wait("50 control periods", lambda: periods(robot.record()[again:]) > 50)
    assert set(robot.record()) == {"observe good", SAFE}
    assert robot.operator("activate").returncode == 0
    back = robot.wait_for(POLICY)
    assert robot.record()[:back].count("first reset") == 1
    assert POLICY not in robot.record()[: robot.record().index("first reset")]


def test_a_server_ignores_the_emergency_stop_of_another_server_with_the_same_policy_file(robot: Robot) -> None:
    """Two servers use one policy file. After a restart, the first server still has its emergency stop.

    The other server has no emergency stop.
    """
    robot.configure(**PATIENT)
    server = robot.serve()
    robot.wait("the server", lambda: robot.operator("state").returncode == 0)
    robot.operator("estop")
    wait_for_state_file(robot)
    server.kill()
    server.wait()
    other = yaml.safe_load((robot.folder / "robot.yaml").read_text())
    other["endpoints"]["policy"] = f"ipc://{robot.folder}/other"
    (robot.folder / "other.yaml").write_text(yaml.safe_dump(other))
    words = ("policy", "--bundle", "policy.safetensors", "--config", "other.yaml")
    robot._start("other.log", "-m", "td3_robot.cli.main", *words)
    robot.wait("the other server", lambda: "policy: inactive -> active: autostart" in robot.log("other.log"))
    assert f"belongs to policy server policy of {robot.folder}/robot.yaml" in robot.log("other.log")
    assert "emergency stop" not in robot.log("other.log")
    robot.serve(log="again.log")
    robot.wait("the stop", lambda: "the emergency stop is still in force" in robot.log("again.log"))
