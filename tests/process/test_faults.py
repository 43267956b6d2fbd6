"""Faults of a robot, its driver and its policy server, all as real processes.

The policy always returns 0.5 N·m and the safe action is −0.125 N·m, so the action shows who chose it.
To measure time, the tests count the driver's observations: one per 20 ms, and fewer on a busy machine. So the tests
depend on the order of events, not on the speed of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import yaml
import zmq

from td3_robot.bundle import Bundle, layer_shapes, sha256
from td3_robot.driver.hang import EXIT_HUNG
from td3_robot.messages import PROTOCOL_VERSION, Weights, Welcome
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import codec
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import KeyFolder
from td3_robot.transport.link import ClientLink, hello
from tests.conftest import poll_until
from tests.process.conftest import LOOPBACK, free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "pendulum_driver.py"
DRIVER = Path(__file__).parent / "recording_driver.py"
SPEC = RobotSpec(
    "Pendulum",
    (Channel("angle.sin", "1", -1, 1), Channel("angle.cos", "1", -1, 1), Channel("velocity", "rad/s", -30, 30)),
    (Channel("torque", "N·m", -1, 1),),
    0.02,
)
POLICY, SAFE = "apply 0.500000", "apply -0.125000"
ACTS = "policy/leg: inactive -> active: a source has joined"
DEADLINE = 1000  # ms: 50 control periods
PERIODS = DEADLINE // 20
AUTOMATIC = {"recovery": "automatic", "recovery_ms": 200}
PATIENT = {"observation_deadline_ms": 60_000, "action_deadline_ms": 60_000}
"""Long deadlines for tests that do not test deadlines. On a busy machine a process can stall for a second."""


def bundle(torque: float = 0.5, version: int = 3, hidden: tuple[int, ...] = (4,), **changes: Any) -> Bundle:
    """A policy that always returns the same torque: tanh(bias) with zero weights. ``changes`` replaces tensors."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in layer_shapes(SPEC, hidden).items()}
    tensors[f"actor.{len(hidden)}.bias"][:] = np.arctanh(torque)
    return Bundle(SPEC, hidden, {**tensors, **changes}, provenance={"version": version})


class Robot:
    """The processes of one robot and the folder in which they run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        bundle().save(folder / "policy.safetensors")

    def configure(self, server: str | None = None, learner: str | None = None, **safety: Any) -> None:
        """Write robot.yaml and driver.yaml.

        Args:
            server: endpoint to which the driver connects, for example the endpoint of a ``Cable``.
            learner: endpoint of the learner.
            safety: settings of the section ``safety``.
        """
        settings = {
            "safe_action": {"torque": -0.125},
            "observation_deadline_ms": DEADLINE,
            "action_deadline_ms": DEADLINE,
            **safety,
        }
        endpoint = f"ipc://{self.folder}/policy"
        for name, where in (("robot", endpoint), ("driver", server or endpoint)):
            endpoints = {"policy": where, **({"learner": learner} if learner else {})}
            text = yaml.safe_dump({"safety": settings, "endpoints": endpoints})
            (self.folder / f"{name}.yaml").write_text(text)

    def _start(
        self, log: str, *words: str, before: Sequence[str] = (), stderr: int = subprocess.STDOUT
    ) -> subprocess.Popen[str]:
        command = [*before, sys.executable, *words]
        with (self.folder / log).open("a") as output:
            process = subprocess.Popen(command, cwd=self.folder, stdout=output, stderr=stderr, text=True)
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    def serve(self, *options: str, log: str = "server.log", **how: Any) -> subprocess.Popen[str]:
        words = ("policy", "--bundle", "policy.safetensors", "--config", "robot.yaml", *options)
        return self._start(log, "-m", "td3_robot.cli.main", *words, **how)

    def drive(self, example: Path = EXAMPLE, **how: Any) -> subprocess.Popen[str]:
        words = [str(DRIVER), "record", "fault", str(example), "--config", "driver.yaml"]
        return self._start("driver.log", *words, **how)

    def operator(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "td3_robot.cli.main", "node", *words, "--config", "robot.yaml"]
        return subprocess.run(
            [*command, "--timeout", "60"], cwd=self.folder, capture_output=True, text=True, check=False
        )

    def fault(self, word: str) -> None:
        new = self.folder / "fault.new"
        new.write_text(word)
        new.rename(self.folder / "fault")

    def record(self) -> list[str]:
        path = self.folder / "record"
        return path.read_text().splitlines() if path.exists() else []

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    def wait(self, what: str, check: Callable[[], Any], timeout: float = 120) -> Any:
        """Wait until ``check`` returns a true value, and return that value."""

        def complaint() -> str:
            logs = "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log"))
            return f"timeout while waiting for {what}; record ends with {self.record()[-10:]}\n{logs}"

        return poll_until(check, complaint, timeout)

    def wait_for(self, line: str, after: int = 0) -> int:
        """Wait for a line of the record at index ``after`` or later, and return its index."""

        def find() -> int:
            lines = self.record()
            return next((index + 1 for index in range(after, len(lines)) if lines[index] == line), 0)

        return int(self.wait(line, find)) - 1

    def running(self) -> int:
        """Wait until the policy moves the robot. Return the number of lines in the record."""
        self.wait_for(POLICY)
        return len(self.record())


def periods(lines: list[str]) -> int:
    """Count the control periods in lines of the record."""
    return sum(line.startswith("observe") for line in lines)


def until_safe(robot: Robot, begin: int) -> tuple[int, int]:
    """Wait for the safe action at index ``begin`` of the record or later.

    Returns:
        The index of the safe action, and the number of periods since the policy's last action.
    """
    safe = robot.wait_for(SAFE, begin)
    lines = robot.record()
    last = max(index for index in range(safe) if lines[index] == POLICY)
    return safe, periods(lines[last:safe])


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Robot]:
    it = Robot(tmp_path)
    yield it
    it.end()


def test_killed_policy_server_puts_robot_in_fault_until_activate(robot: Robot) -> None:
    robot.configure()
    server = robot.serve()
    robot.drive()
    begin = robot.running()
    server.kill()
    safe, waited = until_safe(robot, begin)
    assert waited <= PERIODS + 1
    robot.serve()
    # The new server sends actions again, but the robot ignores them.
    robot.wait("the driver to join the new server", lambda: robot.log("server.log").count(ACTS) >= 2)
    robot.wait("half a second", lambda: periods(robot.record()[safe:]) > 25)
    assert POLICY not in robot.record()[safe:]
    answer = json.loads(robot.operator("state", "--target", "leg", "--json").stdout)
    assert (answer["state"], answer["reason"]) == ("fault", f"no action for {DEADLINE} ms")
    assert robot.operator("activate", "--target", "leg").returncode == 0
    robot.wait_for(POLICY, safe)
    assert f"leg: active -> fault: no action for {DEADLINE} ms" in robot.log("driver.log")
    assert "leg: fault -> active: activate was asked for" in robot.log("driver.log")


def test_robot_recovers_after_policy_server_pauses_for_two_seconds(robot: Robot) -> None:
    """Both sides detect the silence, log a fault and recover automatically, as configured."""
    robot.configure(**AUTOMATIC)
    server = robot.serve()
    robot.drive()
    robot.running()
    server.send_signal(signal.SIGSTOP)
    begin = len(robot.record())
    safe, waited = until_safe(robot, begin)
    assert waited <= PERIODS + 1
    robot.wait("two seconds", lambda: periods(robot.record()[begin:]) > 100)
    server.send_signal(signal.SIGCONT)
    back = robot.wait_for(POLICY, safe)
    assert periods(robot.record()[begin:back]) > 100  # queued actions did not move the robot
    assert f"leg: active -> fault: no action for {DEADLINE} ms" in robot.log("driver.log")
    assert f"policy/leg: active -> fault: no observation for {DEADLINE} ms" in robot.log("server.log")
    for log in ("driver.log", "server.log"):
        assert "fault -> active" in robot.log(log)


@pytest.fixture
def full() -> Iterator[int]:
    """A full pipe that nobody reads, like a terminal after Ctrl-S."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, bytes(4096))
    os.set_blocking(writes, True)
    yield writes
    os.close(writes)
    os.close(reads)


def test_blocked_stderr_delays_neither_safety_nor_shutdown(robot: Robot, full: int) -> None:
    """The emergency stop, safe action, reset and termination of both processes work with a full stderr."""
    robot.configure()
    server = robot.serve(stderr=full)
    driver = robot.drive(stderr=full)
    begin = robot.running()
    assert robot.operator("freeze").returncode == 0
    assert robot.operator("estop").returncode == 0
    safe = robot.wait_for(SAFE, begin)
    assert robot.operator("reset").returncode == 0
    assert robot.operator("activate").returncode == 0
    begin = robot.wait_for(POLICY, safe)
    server.kill()
    _, waited = until_safe(robot, begin)
    assert waited <= PERIODS + 1
    driver.terminate()
    assert driver.wait(60) == 128 + signal.SIGTERM
    assert robot.record()[-1] == SAFE
    server = robot.serve(stderr=full)
    assert robot.operator("state").returncode == 0
    server.terminate()
    assert server.wait(60) == 128 + signal.SIGTERM


def test_hung_method_ends_driver_even_with_blocked_stderr(robot: Robot, full: int) -> None:
    robot.configure(hang_ms=1000, **PATIENT)
    robot.serve()
    driver = robot.drive(stderr=full)
    robot.running()
    robot.fault("hang")
    assert driver.wait(60) == EXIT_HUNG
    assert robot.record()[-1] == "stop"


class Cable:
    """A TCP proxy from the driver to the server's Unix socket. It can stop or delay bytes.

    Attributes:
        whole: set while bytes pass; cleared while the proxy holds them back.
        delay: delay of each block of bytes, in seconds.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.whole = threading.Event()
        self.whole.set()
        self.over = False
        self.delay = 0.0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while not self.over:
            try:
                one = self.listener.accept()[0]
            except OSError:
                return
            other = socket.socket(socket.AF_UNIX)
            try:
                other.connect(str(self.target))
            except OSError:
                one.close()
                other.close()
                continue
            self._open += [one, other]
            for pair in ((one, other), (other, one)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(self.delay)
                self.whole.wait()
                sink.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self.over = True
        self.whole.set()
        self.listener.shutdown(socket.SHUT_RDWR)  # shutdown() ends accept(); close() does not
        self._accepting.join()
        for one in [self.listener, *self._open]:
            one.close()


@pytest.mark.parametrize("how", ["cut", "late"])
def test_robot_recovers_after_link_is_cut_or_late(robot: Robot, how: str) -> None:
    """``late`` adds 300 ms each way, so every Action answers an outdated observation."""
    cable = Cable(robot.folder / "policy")
    try:
        robot.configure(server=cable.endpoint, **AUTOMATIC)
        robot.serve()
        robot.drive()
        begin = robot.running()
        if how == "cut":
            cable.whole.clear()
        else:
            cable.delay = 0.3
        safe, waited = until_safe(robot, begin)
        assert waited <= PERIODS + 1
        if how == "cut":  # the server's watchdog also detects the fault, but cannot send it to the driver
            robot.wait("the server's fault", lambda: "policy/leg: active -> fault" in robot.log("server.log"))
        cable.delay = 0.0
        cable.whole.set()
        robot.wait_for(POLICY, safe)
    finally:
        cable.close()


def test_frozen_observations_cause_a_fault(robot: Robot) -> None:
    """The driver applies the safe action after at most frozen_ms (300 ms, 15 periods) plus the action deadline."""
    deadline = 3 * DEADLINE  # long compared with 300 ms
    robot.configure(frozen_ms=300, observation_deadline_ms=deadline, action_deadline_ms=deadline, **AUTOMATIC)
    robot.serve()
    robot.drive()
    begin = robot.running()
    robot.fault("frozen")
    frozen = robot.wait_for("observe frozen", begin)
    safe = robot.wait_for(SAFE, frozen)
    assert periods(robot.record()[frozen:safe]) <= 15 + 3 * PERIODS
    reason = (
        f"policy/leg: active -> fault: no observation for {deadline} ms: the observation has been the same for 300 ms"
    )
    robot.wait("the server's fault", lambda: reason in robot.log("server.log"))
    robot.fault("")
    robot.wait_for(POLICY, len(robot.record()))


def test_nan_observations_cause_a_fault(robot: Robot) -> None:
    """The driver rejects NaN within one period and does not send it."""
    robot.configure(action_deadline_ms=60_000, **AUTOMATIC)
    robot.serve()
    robot.drive()
    begin = robot.running()
    robot.fault("nan")
    bad = robot.wait_for("observe nan", begin)
    safe = robot.wait_for(SAFE, bad)
    assert periods(robot.record()[bad:safe]) == 1
    robot.wait("the server's fault", lambda: "no observation for" in robot.log("server.log"))
    assert POLICY not in robot.record()[safe:]
    robot.fault("")
    robot.wait_for(POLICY, safe)
    assert "leg: active -> fault: observe: ValueError: 'angle.sin' is nan" in robot.log("driver.log")
    assert "dropped" not in robot.log("server.log")


def test_resets_of_two_seconds_cause_no_fault_with_a_deadline_of_200_ms(
    robot: Robot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine an observation can be late within an episode. So the test counts only faults during resets."""
    monkeypatch.setenv("EPISODE", "20")
    robot.configure(observation_deadline_ms=200, **AUTOMATIC)
    robot.serve()
    robot.drive()
    begin = robot.running()
    for _ in range(2):
        reset = robot.wait_for("reset", begin)
        before = robot.log("server.log").count("active -> fault")
        ready = robot.wait_for("ready", reset)
        assert robot.log("server.log").count("active -> fault") == before
        assert ready == reset + 1  # no action during the reset
        assert robot.record()[reset - 1] == SAFE
        begin = robot.wait_for(POLICY, ready)


def test_robot_that_never_comes_back_from_its_reset_is_in_fault(robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server removes the blocked driver after 5 s of silence. The reset timeout is longer than 5 s."""
    monkeypatch.setenv("EPISODE", "20")
    robot.configure(observation_deadline_ms=200, reset_timeout_ms=6000, **AUTOMATIC)
    robot.serve()
    robot.fault("stuck")
    robot.drive()
    robot.wait_for("reset", robot.running())
    reason = "policy/leg: active -> fault: no observation for 6000 ms: the robot did not come back from its reset"
    robot.wait("the server's fault", lambda: reason in robot.log("server.log"))
    assert robot.record()[-2:] == [SAFE, "reset"]


def test_driver_and_server_report_their_rate_and_missed_deadlines(robot: Robot) -> None:
    """The driver observes every 40 ms and so misses every second deadline."""
    robot.configure(**PATIENT)
    robot.serve()
    robot.fault("slow")
    robot.drive()
    robot.running()
    warning = r"WARNING leg: \S+ of 50 Hz, jitter \S+ ms; missed \S+% of the deadlines in 5 s; allowed: 5.0%"
    robot.wait("the driver's warning", lambda: re.search(warning, robot.log("driver.log")))
    robot.wait("the server's figures", lambda: "answers to leg: " in robot.log("server.log"))
    detail = json.loads(robot.operator("state", "--json").stdout)
    for loop in (detail["loop"], detail["loops"]["leg"]):
        assert 1 < loop["rate_hz"] < 35
        assert loop["jitter_s"] >= 0
    assert detail["loops"]["leg"]["missed_share"] > 0.3
    assert "  loops leg: " in robot.operator("state").stdout


def test_emergency_stop_holds_only_for_the_configuration_of_its_server(robot: Robot) -> None:
    """Both servers serve the same policy file. The stop still holds for the first configuration."""
    robot.configure(**PATIENT)
    server = robot.serve()
    robot.wait("the server", lambda: robot.operator("state").returncode == 0)
    robot.operator("estop")
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


class Learner:
    """A fake learner that sends the messages that the test chooses."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._client = b""

    def welcome(self) -> None:
        """Wait for the policy server's Hello and answer it with a Welcome."""
        while True:
            assert self._socket.poll(60_000), "no Hello"
            self._client, topic, payload = self._socket.recv_multipart()
            if topic == b"hello" and msgpack.unpackb(payload)["role"] == "policy":
                break
        self.send(b"welcome", codec.encode(Welcome(PROTOCOL_VERSION, "learner", 1)))

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._client, *frames])

    def weights(self, version: int, payload: bytes, digest: str = "") -> None:
        self.send(b"weights", codec.encode(Weights(version, 0, 0, digest or sha256(payload), payload)))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_hung_sensors_end_the_driver(robot: Robot) -> None:
    """SIGTERM cannot end a hung driver, so the driver ends itself. A new driver begins with the safe action."""
    robot.configure(hang_ms=2000, **AUTOMATIC)
    robot.serve()
    driver = robot.drive()
    robot.running()
    robot.fault("hang")
    assert driver.wait(120) == 70
    assert robot.record()[-2:] == ["observe hang", "stop"]
    line = "HUNG: observe() has not returned for 2000 ms; stop() was called; the driver ends\n"
    assert robot.log("driver.log").endswith(line)
    robot.wait("the server's fault", lambda: f"no observation for {DEADLINE} ms" in robot.log("server.log"))
    robot.fault("")
    robot.drive()
    robot.wait("the restarted driver", lambda: robot.record() and "stop" not in robot.record())
    assert robot.record()[0] == SAFE
    robot.running()


def test_server_and_driver_notify_systemd_while_they_run(robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    robot.configure()
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    monkeypatch.setenv("NOTIFY_SOCKET", str(robot.folder / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(robot.folder / "notify"))
        systemd.settimeout(60)
        for start in (robot.serve, robot.drive):
            process = start()
            assert systemd.recv(100) == b"READY=1\nWATCHDOG=1"
            assert [systemd.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            process.send_signal(signal.SIGSTOP)  # so that later messages come only from the other process
            robot.wait(
                "the process to be stopped",
                lambda pid=process.pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED,
            )
            systemd.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    systemd.recv(100)
            systemd.settimeout(60)


def test_server_refuses_bad_weights_and_keeps_good_weights_after_the_learner_ends(
    robot: Robot, rng: np.random.Generator
) -> None:
    """Bad weights change nothing. The server adopts good weights live and keeps them after the learner ends."""
    learner = Learner(f"ipc://{robot.folder}/learner")
    try:
        robot.configure(learner=f"ipc://{robot.folder}/learner", **PATIENT)
        robot.serve()
        robot.drive()
        begin = robot.running()
        learner.welcome()
        for size in (0, 1, 1000):
            learner.send(b"weights", rng.bytes(size))
            learner.send(rng.bytes(size))
        learner.weights(9, bundle(0.25).encode(), digest="0" * 64)
        learner.weights(9, rng.bytes(1000))
        bias = {"actor.1.bias": np.full(1, np.nan, np.float32)}
        learner.weights(9, bundle(0.25, **bias).encode())
        learner.weights(2, bundle(0.25).encode())  # older than the served version
        robot.wait("the refusals", lambda: robot.log("server.log").count("refused:") >= 4)
        assert set(robot.record()[begin:]) <= {"observe good", POLICY}
        learner.weights(9, bundle(0.25).encode())
        taught = robot.wait_for("apply 0.250000", begin)
    finally:
        learner.close()
    robot.wait("a second without a learner", lambda: periods(robot.record()[taught:]) > 50)
    assert set(robot.record()[taught:]) == {"observe good", "apply 0.250000"}


def test_remote_learner_adapts_the_policy_of_a_running_robot(robot: Robot) -> None:
    """A real learner gets the driver's Steps and sends Weights. After the learner ends, the robot keeps moving."""
    robot.configure(learner=f"ipc://{robot.folder}/learner", **AUTOMATIC)
    content = {
        "pacing": {"mode": "realtime"},
        "network": {"hidden": [4]},
        "evaluation": {"every": 0},
        "learner": {"learning_starts": 20, "batch_size": 16},
        "endpoints": {"learner": f"ipc://{robot.folder}/learner"},
    }
    (robot.folder / "run").mkdir()
    (robot.folder / "run" / "config.yaml").write_text(yaml.safe_dump(content))
    robot.serve()
    robot.drive()
    begin = robot.running()
    learner = robot._start("learner.log", "-m", "td3_robot.cli.main", "learner", "--run", "run")
    robot.wait(
        "actions of the learner's policy while it learns",
        lambda: len({*robot.record()[begin:], SAFE, POLICY, "observe good"}) > 5,
    )
    learner.kill()
    learner.wait()
    end = len(robot.record())
    robot.wait("a second without the learner", lambda: periods(robot.record()[end:]) > 50)
    robot.wait("actions of the learner's policy", lambda: {*robot.record()[-10:]} - {SAFE, POLICY, "observe good"})


def test_second_server_and_second_driver_are_refused(robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    robot.configure(**PATIENT)
    robot.serve()
    robot.drive()
    begin = robot.running()
    second = robot.serve(log="second.log")
    assert second.wait(120) == 2
    assert "is busy: another process serves it" in robot.log("second.log")
    monkeypatch.setenv("HOLD_OFF", "60")  # s; the driver must not take a slow refusal for a lost server
    words = (str(DRIVER), "impostor", "fault", str(EXAMPLE), "--config", "driver.yaml")
    impostor = robot._start("impostor.log", *words)
    assert impostor.wait(120) == 2
    assert "--name is 'leg': this machine already runs a driver with this name for the policy server at" in robot.log(
        "impostor.log"
    )
    # The second driver connects through a TCP proxy, as from another machine. The server refuses this driver.
    cable = Cable(robot.folder / "policy")
    other, later = cable.endpoint, str(int(time.time()) + 1000)
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
    """A killed driver may have left the robot in the middle of a movement, so a refused driver must make it safe."""
    robot.configure()
    if why == "robot":
        policy = bundle()
        Bundle(replace(SPEC, name="Crane"), policy.hidden, policy.tensors).save(robot.folder / "policy.safetensors")
        reason = "robot specification differs: robot is 'Crane' here, 'Pendulum' there"
    else:
        ours, theirs = KeyFolder(robot.folder / "robot-keys"), KeyFolder(robot.folder / "driver-keys")
        theirs.allow("server", ours.create("server").public, "server:policy")
        ours.allow("leg", theirs.create("leg").public, "evaluator")
        [port] = free_ports(1)
        for name in ("robot", "driver"):
            path = robot.folder / f"{name}.yaml"
            endpoints = {"policy": f"tcp://{LOOPBACK}:{port}", "keys": f"{name}-keys"}
            path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "endpoints": endpoints}))
        reason = "the key of 'leg' may not have role driver"
    robot.serve()
    driver = robot.drive()
    assert driver.wait(120) == 2
    assert set(robot.record()) == {SAFE}  # the driver did not read its sensors
    assert "leg: refused by the policy server; the driver applies the safe action and ends" in robot.log("driver.log")
    assert f"leg: link policy: refused by the server: {reason}" in robot.log("driver.log")


def test_refused_driver_makes_its_robot_safe_while_a_dead_driver_has_the_same_name(robot: Robot) -> None:
    """The dead driver and the new driver have the same incarnation, so the server refuses the new driver."""
    robot.configure()
    robot.serve()
    dead = Bus()
    introduction = hello("driver", "leg", client=1, incarnation=7, robots=1, spec=SPEC)
    dead.connect(f"ipc://{robot.folder}/policy", ClientLink("policy", introduction, ()))
    robot.wait("the welcome of the first driver", lambda: bool(dead.receive(0.05)) or dead.welcome("policy"))
    words = (str(DRIVER), "record", "fault", str(EXAMPLE), "--config", "driver.yaml", "--incarnation", "7")
    driver = robot._start("driver.log", *words)
    assert driver.wait(120) == 2
    assert set(robot.record()) == {SAFE}
    assert "refused by the server: name 'leg' is taken by a driver that is connected" in robot.log("driver.log")
    dead.close()


def test_refused_new_version_of_a_killed_driver_makes_its_robot_safe(robot: Robot) -> None:
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


def test_emergency_stop_from_the_command_line_and_from_the_robot(robot: Robot) -> None:
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
    # Both processes end on SIGTERM, and the driver's last action is the safe action.
    for process in (driver, server):
        process.terminate()
        assert process.wait(120) == 143
        if process is driver:
            assert robot.record()[-1] == SAFE
            alone = robot.operator("estop")
            assert alone.returncode == 1
            assert "no robot is connected: none has confirmed the stop" in alone.stderr


def test_sighup_and_sigquit_end_the_driver_cleanly(robot: Robot) -> None:
    """A closed terminal and Ctrl-\\ work like SIGTERM: the driver's last action is the safe action."""
    robot.configure(**PATIENT)
    robot.serve()
    for number in (signal.SIGHUP, signal.SIGQUIT):
        (robot.folder / "record").unlink(missing_ok=True)
        # If a shell starts the tests with nohup or &, the tests ignore signals. The driver would also ignore them.
        ours = signal.signal(number, signal.SIG_DFL)
        try:
            driver = robot.drive()
        finally:
            signal.signal(number, ours)
        robot.running()
        driver.send_signal(number)
        assert driver.wait(120) == 128 + number
        assert robot.record()[-1] == SAFE


def test_operator_loads_and_rolls_back_policies_and_ends_the_example_driver(robot: Robot) -> None:
    """Run the example driver unchanged, and load and roll back policies while it runs."""
    robot.configure(**PATIENT)
    server = robot.serve("--frozen")
    driver = robot._start("driver.log", str(EXAMPLE), "--config", "driver.yaml")

    def state(*words: str) -> Any:
        answer = robot.operator(*words, "--json")
        return json.loads(answer.stdout) if answer.stdout else {}

    robot.wait("the robot", lambda: state("state").get("connected") == ["pendulum"])
    assert state("state", "--target", "pendulum")["state"] == "active"
    bundle(0.25, version=8).save(robot.folder / "new.safetensors")
    assert (state("load", "new.safetensors")["version"], state("state")["frozen"]) == (8, True)
    assert "not newer than version 8" in robot.operator("load", "policy.safetensors").stderr
    assert state("rollback")["version"] == 3
    for target, process in (("pendulum", driver), ("policy", server)):
        assert robot.operator("shutdown", "--target", target).returncode == 0
        assert process.wait(120) == 0
    nobody = subprocess.run(
        [sys.executable, "-m", "td3_robot.cli.main", "node", "state", "--config", "robot.yaml", "--timeout", "0.2"],
        cwd=robot.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert nobody.returncode == 1
    assert nobody.stderr.startswith("td3-robot node: no answer from policy server at ipc://")
