"""A server refuses a second driver and a wrong driver.

A refused driver makes its robot safe. There is one exception: if another driver moves this robot, the refused driver
applies no action.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from td3_robot.bundle import Bundle
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import KeyFolder
from td3_robot.transport.link import ClientLink, hello
from tests.conftest import free_port
from tests.process.deployed_robot import (
    DRIVER,
    EXAMPLE,
    PATIENT,
    POLICY,
    SAFE,
    SPEC,
    Cable,
    Robot,
    bundle,
    periods,
)

LINK = "td3_robot.transport.link"


def test_second_server_and_second_driver_are_refused(robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    robot.configure(**PATIENT)
    robot.serve(limits={f"{LINK}.DRIVER_SILENCE": 300, f"{LINK}.PEER_TIMEOUT": 300})
    robot.drive()
    begin = robot.running()
    second = robot.serve(log="second.log")
    assert second.wait(120) == 2
    assert "is busy: another process serves it" in robot.log("second.log")
    # Before its Welcome, a driver applies the safe action if the server is silent for HOLD_OFF seconds. This driver
    # must apply no action, even if the refusal comes late.
    monkeypatch.setenv("HOLD_OFF", "60")
    words = (str(DRIVER), "impostor", "fault", str(EXAMPLE), "--config", "driver.yaml")
    impostor = robot._start("impostor.log", *words)
    assert impostor.wait(120) == 2
    assert "--name is 'leg': this machine already runs a driver with this name for the policy server at" in robot.log(
        "impostor.log"
    )
    # The second driver connects through a TCP proxy, as if it ran on another machine. The server refuses this driver.
    cable = Cable(robot.folder / "policy")
    other, later = cable.endpoint, str(int(time.time() * 1000) + 1_000_000)
    impostor = robot._start("impostor.log", *words, "--set", f"endpoints.policy={other}", "--incarnation", later)
    assert impostor.wait(120) == 2
    assert "name 'leg' is taken by a driver that is connected" in robot.log("impostor.log")
    assert (robot.folder / "impostor").read_text() == ""  # no second driver read sensors or applied an action
    robot.wait("more periods", lambda: periods(robot.record()[begin:]) > 10)
    assert set(robot.record()[begin:]) == {"observe good", POLICY}
    # The server refuses a second driver even while the first driver is in fault and sends few messages.
    robot.fault("nan")
    robot.wait_for(SAFE, begin)
    impostor = robot._start("impostor.log", *words, "--set", f"endpoints.policy={other}", "--incarnation", later)
    assert impostor.wait(120) == 2
    assert robot.log("impostor.log").count("name 'leg' is taken by a driver that is connected") == 2
    assert (robot.folder / "impostor").read_text() == ""
    cable.close()


@pytest.mark.parametrize("why", ["robot", "key"])
def test_refused_driver_makes_its_robot_safe(robot: Robot, why: str) -> None:
    """If a driver was killed, its robot is possibly still moving. So a refused driver must make its robot safe."""
    robot.configure()
    if why == "robot":
        policy = bundle()
        Bundle(replace(SPEC, name="Crane"), policy.hidden, policy.tensors).save(robot.folder / "policy.safetensors")
        reason = "robot specification differs: robot is 'Crane' here, 'Pendulum' there"
    else:
        ours, theirs = KeyFolder(robot.folder / "robot-keys"), KeyFolder(robot.folder / "driver-keys")
        theirs.allow("server", ours.create("server").public, "server:policy")
        ours.allow("leg", theirs.create("leg").public, "evaluator")
        port = free_port()
        for name in ("robot", "driver"):
            robot.add(name, endpoints={"policy": f"tcp://127.0.0.1:{port}", "keys": f"{name}-keys"})
        reason = "the key of 'leg' may not have role driver"
    robot.serve()
    driver = robot.drive()
    assert driver.wait(120) == 2
    assert set(robot.record()) == {SAFE}  # the driver did not read its sensors
    assert "leg: refused by the policy server; the driver applies the safe action and ends" in robot.log("driver.log")
    assert f"leg: link policy: refused by the server: {reason}" in robot.log("driver.log")


def test_refused_driver_makes_its_robot_safe_while_a_dead_driver_has_the_same_name(
    robot: Robot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a driver with another incarnation can replace a dead driver. Here both drivers have incarnation 7.

    The test plays the dead driver: it connects with a Hello and is then silent. This server does not forget silent
    clients.
    """
    robot.configure()
    robot.serve(limits={f"{LINK}.PEER_TIMEOUT": 300})
    gate = robot.folder / "gate"
    monkeypatch.setenv("GATE", str(gate))
    words = (str(DRIVER), "record", "fault", str(EXAMPLE), "--config", "driver.yaml", "--incarnation", "7")
    driver = robot._start("driver.log", *words)
    robot.wait("the driver", (robot.folder / "record").exists)
    dead = Bus()
    introduction = hello("driver", "leg", client=1, incarnation=7, robots=1, spec=SPEC)
    dead.connect(f"ipc://{robot.folder}/policy", ClientLink("policy", introduction, ()))
    robot.wait("the welcome of the first driver", lambda: bool(dead.receive(0.05)) or dead.welcome("policy"))
    gate.touch()
    assert driver.wait(120) == 2
    assert set(robot.record()) == {SAFE}
    assert "refused by the server: name 'leg' is taken by a driver that is connected" in robot.log("driver.log")
    dead.close()


def test_a_driver_with_a_changed_specification_is_refused_and_makes_its_robot_safe(robot: Robot) -> None:
    """The server has not yet removed the killed driver when a driver with another robot specification connects."""
    update = robot.folder / "update.py"
    update.write_text(EXAMPLE.read_text().replace('"Pendulum"', '"Crane"'))
    robot.configure(observation_deadline_ms=None)  # the server must not notice the silence of the killed driver
    robot.serve()
    first = robot.drive()
    robot.running()
    first.kill()
    first.wait()
    (robot.folder / "record").unlink()
    assert robot.operator("state").returncode == 0  # the server answers
    assert robot.drive(update).wait(120) == 2
    assert set(robot.record()) == {SAFE}
    assert "robot specification differs: robot is 'Pendulum' here, 'Crane' there" in robot.log("driver.log")
