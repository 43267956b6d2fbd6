"""A robot with its driver and its policy server as real processes.

The policy always returns 0.5 N·m and the safe action is −0.125 N·m, so an action shows whether the policy chose it.
To measure time, the tests count the driver's observations: one per 20 ms, and fewer on a busy machine. So the tests
depend on the order of events, not on the speed of the machine.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from td3_robot.bundle import Bundle, layer_shapes
from td3_robot.specs import Channel, RobotSpec
from tests.conftest import poll_until

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
"""Long deadlines for tests that do not test deadlines. On a busy machine a process can stall for over a second."""


def bundle(torque: float = 0.5, version: int = 3, hidden: tuple[int, ...] = (4,), **changes: Any) -> Bundle:
    """A policy that always returns the same torque: tanh(bias) with zero weights. ``changes`` replaces tensors."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in layer_shapes(SPEC, hidden).items()}
    tensors[f"actor.{len(hidden)}.bias"][:] = np.arctanh(torque)
    return Bundle(SPEC, hidden, {**tensors, **changes}, provenance={"version": version})


def program(limits: Mapping[str, float]) -> tuple[str, ...]:
    """Words after ``python`` that start the command td3-robot with longer time limits, which a busy machine can meet.

    Args:
        limits: maps a constant of the package to its new value, for example
            ``{"td3_robot.transport.link.PEER_TIMEOUT": 300}``.
    """
    if not limits:
        return "-m", "td3_robot.cli.main"
    places = [(*name.rsplit(".", 1), value) for name, value in limits.items()]
    changes = "".join(f"import {module}; {module}.{constant} = {value}\n" for module, constant, value in places)
    return "-c", f"{changes}import sys\nfrom td3_robot.cli.main import main\nsys.exit(main(sys.argv[1:]))"


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

    def add(self, name: str, **sections: Any) -> None:
        """Add sections to the configuration ``NAME.yaml``, or replace these sections."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}))

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

    def serve(
        self, *options: str, log: str = "server.log", limits: Mapping[str, float] | None = None, **how: Any
    ) -> subprocess.Popen[str]:
        """Start a policy server.

        Args:
            options: further words of the command line.
            log: file for the output.
            limits: see ``program``.
            how: arguments of ``_start``.
        """
        words = ("policy", "--bundle", "policy.safetensors", "--config", "robot.yaml", *options)
        return self._start(log, *program(limits or {}), *words, **how)

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

    def wait(self, what: str, check: Callable[[], Any], timeout: float = 300) -> Any:
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
    """Wait for the safe action in the record, at index ``begin`` or later.

    Returns:
        The index of the safe action, and the number of periods from the policy's last action to the safe action.
    """
    safe = robot.wait_for(SAFE, begin)
    lines = robot.record()
    last = max(index for index in range(safe) if lines[index] == POLICY)
    return safe, periods(lines[last:safe])


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
        self.delay = 0.0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
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
            # libzmq sets this option, too. Without it, the kernel holds back a small message until the driver
            # acknowledges the previous one. Then every Action can be one period late, for minutes.
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        self.whole.set()
        self.listener.shutdown(socket.SHUT_RDWR)  # shutdown() ends accept(); close() does not
        self._accepting.join()
        for one in [self.listener, *self._open]:
            one.close()
