"""Two network namespaces with a simulated cable between them: keys, packet loss and delay."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.transport.keys import KeyFolder
from tests.process.conftest import ROOT
from tests.process.deployed_robot import AUTOMATIC, DEADLINE, PERIODS, POLICY, SAFE, Robot, periods, until_safe

_SERVER, _ROBOT = "10.77.13.1", "10.77.13.2"
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # linux/if_tun.h

# A minimal server and a minimal robot. The server answers every Step, and prints how many connections it has refused.
# The robot sends up to 50 Steps, each after the answer to the previous Step. It ends early if the server refuses the
# robot's key. At the end, the robot prints the number of answers and the number of refusals.
_ENDS = """
import sys, time, numpy as np
from td3_robot.messages import Action, Step
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import link as handshake
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ClientLink, ServerLink

role, endpoint, folder = sys.argv[1:4]
bus = Bus(keys=open_keys(folder or None))
end = time.monotonic() + 170
if role == "server":
    bus.serve(endpoint, ServerLink("policy", "server", {"driver": (Step,)}, {}, 1))
    print("serving", flush=True)
    while time.monotonic() < end:
        for origin, message in bus.receive(0.05):
            if isinstance(message, Step):
                action = np.zeros((1, 1), np.float32)
                bus.send(origin, Action("r", 0, message.sequence, message.stamp, action, 1, 0, 0))
        print("denied", bus.dropped()["denied"], flush=True)
else:
    spec = RobotSpec("Toy", (Channel("o", "m", -1, 1),), (Channel("a", "N", -1, 1),), 0.02)
    hello = handshake.hello("driver", "r", client=1, robots=1, spec=spec)
    bus.connect(endpoint, ClientLink("policy", hello, (Action,)))
    answered, sent = 0, 0
    end = time.monotonic() + 60
    while time.monotonic() < end and answered < 50 and not bus.dropped()["not-allowed"]:
        for _, message in bus.receive(0.02):
            answered += isinstance(message, Action)
        if bus.welcome("policy") and sent < 50 and sent == answered:
            one = np.zeros(1, np.float32)
            bus.send("policy", Step("r", 0, sent, sent, 0, np.ones(1, np.uint8), np.zeros(1, np.uint64),
                np.ones(1, np.uint32), one.reshape(1, 1), one, one.reshape(1, 1), 1, 0, 0, 0, 0, 0, {}))
            sent += 1
    print("answered", answered, bus.dropped()["not-allowed"], flush=True)
bus.close()
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Cable:
    """Two network namespaces and a thread that carries packets between them, with delay and loss.

    It replaces netem, which some kernels lack.

    Attributes:
        server: name of the server's namespace.
        robot: name of the robot's namespace.
        delay: delay of each packet in seconds.
        loss: probability that a packet is lost, 0 to 1.
        lost: number of packets lost so far.
        carried: number of packets that this thread has carried to the other namespace so far.
        late: number of these packets that were over 5 ms late, because this thread did not get the processor.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.server, self.robot = self._spaces = [f"td3-{os.getpid()}-{end}" for end in "sr"]
        self.delay = self.loss = 0.0
        self.lost = self.carried = self.late = 0
        self._rng = rng
        self._plugs: list[int] = []
        self._ends, self._end = os.pipe()
        self._thread = threading.Thread(target=self._carry)

    def lay(self) -> None:
        for space, (here, there) in zip(self._spaces, ((_SERVER, _ROBOT), (_ROBOT, _SERVER)), strict=True):
            _ip("netns", "add", space)
            self._plugs.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(self._plugs[-1], _TUNSETIFF, struct.pack("16sH22x", space.encode(), _TUN_WITHOUT_HEADER))
            _ip("link", "set", space, "netns", space)
            _ip("-n", space, "address", "add", here, "peer", there, "dev", space)
            _ip("-n", space, "link", "set", space, "up")
        self._thread.start()

    def remove(self) -> None:
        os.close(self._end)
        if self._thread.ident:
            self._thread.join()
        for descriptor in (*self._plugs, self._ends):
            os.close(descriptor)
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def _carry(self) -> None:
        under_way: deque[tuple[float, int, bytes]] = deque()
        other = dict(zip(self._plugs, self._plugs[::-1], strict=True))
        while True:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                due, plug, packet = under_way.popleft()
                self.carried += 1
                self.late += now - due > 0.005
                with contextlib.suppress(OSError):  # a full queue drops the packet, as in any network
                    os.write(plug, packet)
            ready = select.select([*self._plugs, self._ends], [], [], under_way[0][0] - now if under_way else None)[0]
            if self._ends in ready:
                return
            for plug in ready:
                packet = os.read(plug, 65536)
                if packet[0] >> 4 == 4 and self._rng.random() < self.loss:  # IPv6 packets are not of the test
                    self.lost += 1
                else:
                    under_way.append((time.monotonic() + self.delay, other[plug], packet))


@pytest.fixture
def cable(rng: np.random.Generator) -> Iterator[Cable]:
    """A cable without loss or delay."""
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the ip command of iproute2")
    made = Cable(rng)
    try:
        made.lay()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this user is not allowed to create network namespaces: {error.stderr.strip()}")
    except OSError as error:
        pytest.skip(f"a cable needs /dev/net/tun: {error}")
    else:
        yield made
    finally:
        made.remove()


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


def _answered(start: Callable[..., Any], space: str, folder: KeyFolder, *, refused: bool = False) -> int:
    """Start a robot, and return the number of its Steps that the server answered.

    ``refused``: whether the server must refuse the robot's key.
    """
    robot = start(space, "robot", f"tcp://{_SERVER}:7000", str(folder.path))
    word, count, refusals = robot.stdout.read().split()
    assert (word, refusals != "0") == ("answered", refused)
    return int(count)


def test_server_accepts_only_allowed_keys_from_another_host(
    cable: Cable, start: Callable[..., Any], keys: tuple[KeyFolder, KeyFolder], tmp_path: Path
) -> None:
    """An allowed key is accepted. An unknown key and a revoked key are refused."""
    server = _serve(start, cable.server, keys[0])
    assert _answered(start, cable.robot, keys[1]) == 50
    other = KeyFolder(tmp_path / "other")
    other.create("other")
    other.allow("server", keys[0].identity().public, "server:policy")
    assert _answered(start, cable.robot, other, refused=True) == 0
    while (line := server.stdout.readline()).split()[1] == "0":
        assert line.startswith("denied")
    keys[0].revoke("robot")
    assert _answered(start, cable.robot, keys[1], refused=True) == 0


def test_every_message_arrives_over_a_cable_that_loses_packets(
    cable: Cable, start: Callable[..., Any], keys: tuple[KeyFolder, KeyFolder]
) -> None:
    """TCP resends lost segments, so every message arrives."""
    cable.delay, cable.loss = 0.005, 0.05
    _serve(start, cable.server, keys[0])
    lost = 0
    while not lost:  # in about 1 of 500 tries, no packet is lost
        before = cable.lost
        assert _answered(start, cable.robot, keys[1]) == 50
        lost = cable.lost - before


class RemoteRobot(Robot):
    """A driver and its policy server on two hosts."""

    def __init__(self, folder: Path, cable: Cable) -> None:
        super().__init__(folder)
        self._cable = cable

    def configure(self, **safety: Any) -> None:  # type: ignore[override]
        super().configure(server=f"tcp://{_SERVER}:7000", **safety)
        for name, folder in (("robot", "server"), ("driver", "robot")):
            self.add(name, endpoints={"policy": f"tcp://{_SERVER}:7000", "keys": folder})

    def _start(self, log: str, *words: str) -> subprocess.Popen[str]:
        space = self._cable.server if log == "server.log" else self._cable.robot
        return super()._start(log, *words, before=("ip", "netns", "exec", space))


def test_robot_tolerates_loss_and_recovers_from_late_or_missing_answers(
    cable: Cable, keys: tuple[KeyFolder, KeyFolder], tmp_path: Path
) -> None:
    """TCP resends lost packets within the deadline. Late or missing answers cause a fault until the cable works again.

    The driver sends an observation every 20 ms. An Action counts only if it answers the newest observation, so a round
    trip must take less than 20 ms.
    """
    del keys
    robot = RemoteRobot(tmp_path, cable)
    try:
        deadline = 3 * DEADLINE  # long enough to resend a segment three times
        robot.configure(observation_deadline_ms=deadline, action_deadline_ms=deadline, **AUTOMATIC)
        cable.delay, cable.loss = 0.003, 0.02
        robot.serve()
        robot.drive()
        begin = robot.running()
        robot.wait("a time longer than the deadline", lambda: periods(robot.record()[begin:]) > 4 * PERIODS)
        slow = cable.late > cable.carried / 2  # the test machine was too slow
        assert slow or SAFE not in robot.record()[begin:]
        for delay, loss in ((0.3, 0.0), (0.003, 1.0)):
            begin = len(robot.record())
            cable.delay, cable.loss = delay, loss
            safe, waited = until_safe(robot, begin)
            assert waited <= 3 * PERIODS + 1
            cable.delay, cable.loss = 0.003, 0.02
            robot.wait_for(POLICY, safe)
    finally:
        robot.end()


def test_server_without_keys_refuses_to_serve_beyond_loopback(cable: Cable) -> None:
    command = ["ip", "netns", "exec", cable.server, sys.executable, "-c", _ENDS, "server", f"tcp://{_SERVER}:7000", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is beyond loopback, and there are no keys" in done.stderr
