"""Keys over a network: two network namespaces, a cable between them, and on it loss and delay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from td3_robot.transport.keys import KeyFolder

ROOT = Path(__file__).parent.parent.parent
_SERVER, _ROBOT = "10.77.13.1", "10.77.13.2"

# Both ends of a link by hand: a server that answers every Step, and a robot that sends 50 and says how many came back.
_ENDS = """
import sys, time, numpy as np
from td3_robot.messages import Action, Step
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import session
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys
from td3_robot.transport.session import ClientSession, Peer, ServerSession

role, endpoint, folder = sys.argv[1:4]
bus = Bus(keys=open_keys(folder or None))
end = time.monotonic() + 60
if role == "server":
    bus.serve(endpoint, ServerSession("policy", "server", {"driver": (Step,)}, {}, 1))
    print("serving", flush=True)
    while time.monotonic() < end:
        for origin, message in bus.receive(0.05):
            if isinstance(message, Step):
                action = np.zeros((1, 1), np.float32)
                bus.send(origin, Action("r", 0, message.sequence, message.stamp, action, 1, 0, 0))
        print("denied", bus.dropped()["denied"], bus.dropped()["revoked"], flush=True)
else:
    spec = RobotSpec("Toy", (Channel("o", "m", -1, 1),), (Channel("a", "N", -1, 1),), 0.02)
    hello = session.hello("driver", "r", client=1, robots=1, spec=spec)
    bus.connect(endpoint, ClientSession("policy", hello, (Action,), {"N": 1, "O": 1, "A": 1}))
    answered, sent = 0, 0
    end = time.monotonic() + float(sys.argv[4])
    while time.monotonic() < end and answered < 50:
        for _, message in bus.receive(0.02):
            answered += isinstance(message, Action)
        if bus.welcome("policy") and sent < 50 and sent == answered:
            one = np.zeros(1, np.float32)
            bus.send("policy", Step("r", 0, sent, sent, 0, np.ones(1, np.uint8), np.zeros(1, np.uint64),
                np.ones(1, np.uint32), one.reshape(1, 1), one, one.reshape(1, 1), 1, 0, 0, 0, 0, 0, {}))
            sent += 1
    print("answered", answered, flush=True)
bus.close()
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with a virtual cable between them."""
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the ip command of iproute2")
    server, robot = (f"td3-{os.getpid()}-{end}" for end in "sr")
    near, far = f"t{os.getpid()}s", f"t{os.getpid()}r"
    try:
        _ip("netns", "add", server)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this user may not make network namespaces: {error.stderr.strip()}")
    try:
        _ip("netns", "add", robot)
        _ip("link", "add", near, "netns", server, "type", "veth", "peer", "name", far, "netns", robot)
        for space, device, address in ((server, near, _SERVER), (robot, far, _ROBOT)):
            _ip("-n", space, "address", "add", f"{address}/30", "dev", device)
            _ip("-n", space, "link", "set", device, "up")
        yield server, robot
    finally:
        for space in (server, robot):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.fixture
def lossy(cable: tuple[str, str]) -> Iterator[None]:
    """5 ms of delay and 2 % of loss on the robot's end of the cable."""
    qdisc = ["qdisc", "%s", "dev", f"t{os.getpid()}r", "root"]
    netem = ["netem", "delay", "5ms", "loss", "2%"]
    enter = ["ip", "netns", "exec", cable[1], "tc"]
    if not shutil.which("tc"):
        pytest.skip("loss and delay need the tc command of iproute2")
    made = subprocess.run([*enter, qdisc[0], "add", *qdisc[2:], *netem], check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this kernel has no netem: {made.stderr.strip()}")
    yield
    subprocess.run([*enter, qdisc[0], "del", *qdisc[2:]], check=True, capture_output=True)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    started: list[subprocess.Popen[str]] = []

    def run(space: str, *words: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", space, sys.executable, "-c", _ENDS, *words]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def keys(tmp_path: Path) -> tuple[KeyFolder, KeyFolder]:
    server, robot = KeyFolder(tmp_path / "server"), KeyFolder(tmp_path / "robot")
    server.allow("robot", robot.create("robot").public)
    robot.allow("server", server.create("server").public, "server:policy")
    return server, robot


def _serve(start: Callable[..., Any], space: str, folder: KeyFolder) -> Any:
    server = start(space, "server", f"tcp://{_SERVER}:7000", str(folder.path))
    assert server.stdout.readline() == "serving\n"
    return server


def _answered(start: Callable[..., Any], space: str, folder: str, seconds: float) -> int:
    robot = start(space, "robot", f"tcp://{_SERVER}:7000", folder, str(seconds))
    word, count = robot.stdout.read().split()
    assert word == "answered"
    return int(count)


def test_keys_between_hosts(
    cable: tuple[str, str], start: Callable[..., Any], keys: tuple[KeyFolder, KeyFolder], tmp_path: Path
) -> None:
    """Right key in, another key out, a revoked one out."""
    server = _serve(start, cable[0], keys[0])
    assert _answered(start, cable[1], str(keys[1].path), 30) == 50
    other = KeyFolder(tmp_path / "other")
    other.create("other")
    other.allow("server", keys[0].identity().public, "server:policy")
    assert _answered(start, cable[1], str(other.path), 1.5) == 0
    while (line := server.stdout.readline()).split()[1] == "0":
        assert line.startswith("denied")
    keys[0].revoke("robot")
    assert _answered(start, cable[1], str(keys[1].path), 1.5) == 0


def test_over_a_bad_cable(
    cable: tuple[str, str], lossy: None, start: Callable[..., Any], keys: tuple[KeyFolder, KeyFolder]
) -> None:
    """TCP sends lost segments again: everything arrives, later."""
    del lossy
    _serve(start, cable[0], keys[0])
    assert _answered(start, cable[1], str(keys[1].path), 60) == 50


def test_without_keys_no_host_serves(cable: tuple[str, str]) -> None:
    command = ["ip", "netns", "exec", cable[0], sys.executable, "-c", _ENDS, "server", f"tcp://{_SERVER}:7000", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is beyond loopback, and there are no keys" in done.stderr
