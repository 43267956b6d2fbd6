"""Fixtures that run real ROS 2 nodes in other processes.

Each test uses its own ROS domain. ROS discovery is limited to this machine.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.bundle import Bundle, Exploration, layer_shapes
from td3_robot.operators import Operator, connect
from td3_robot.specs import Channel, Float32, RobotSpec
from tests.conftest import Command, poll_until
from tests.process.deployed_robot import program
from tests.sessions import save

__all__ = ["save"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DRIVER = "td3_robot_driver"
_DOMAINS = range(1, 102)
"""Domain numbers with ports that Linux does not use as ephemeral ports."""
SAFETY = {"safe_action": "zero", "action_deadline_ms": 5000, "hang_ms": 10000}
HIP = RobotSpec(
    "Hip",
    (Channel("angle", "rad", -100.0, 100.0), Channel("velocity", "rad/s", -100.0, 100.0)),
    (Channel("acceleration", "rad/s²", -1.0, 1.0),),
    0.01,
)
HIP_SOURCES = [{"channel": "velocity", "joint": "hip", "field": "velocity"}, {"channel": "angle", "joint": "hip"}]
STALE_MS = 5000  # long, like action_deadline_ms: a busy machine can pause a process for some seconds
HIP_SECTION = {"bundle": "policy.safetensors", "stale_ms": STALE_MS, "observations": HIP_SOURCES}
"""The section ``ros2`` of the configuration for the robot ``HIP``."""


@functools.cache
def ros_python() -> str | None:
    """Return a Python with rclpy and rosbags; None if no candidate has both packages.

    The candidates are TD3_ROBOT_ROS2_PYTHON, the Python of ``make test-all``, and this Python.
    """
    made = Path(sys.prefix) / "ros2" / "bin" / "python"
    for python in (os.environ.get("TD3_ROBOT_ROS2_PYTHON"), str(made) if made.exists() else None, sys.executable):
        if python:
            imports = [python, "-c", "import rclpy, rosbags"]
            if subprocess.run(imports, capture_output=True, check=False).returncode == 0:
                return python
    return None


@pytest.fixture
def python() -> str:
    found = ros_python()
    if found is None:
        pytest.skip(
            "rclpy and rosbags are not installed: run make test-all, or set TD3_ROBOT_ROS2_PYTHON to a Python with both"
        )
    return found


@pytest.fixture
def domain() -> Iterator[int]:
    """The number of a ROS domain that no other test on this machine uses."""
    folder = Path(tempfile.gettempdir()) / "td3-robot-ros-domains"
    folder.mkdir(exist_ok=True)
    for number in _DOMAINS:
        with (folder / str(number)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
    pytest.fail("all ROS domains are in use")


class Console:
    """Calls ROS services, and publishes and reads messages, through ``console_node.py`` in another process.

    Each operation of ``console_node.py`` is a method, for example ``console.state(node)``.
    """

    def __init__(self, world: World, *namespaces: str) -> None:
        self._process = subprocess.Popen(
            [world.python, str(HERE / "console_node.py"), *namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=world.folder,
            env=world.environment,
        )
        assert self._read() == "ready"

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self._process.stdin
            self._process.stdin.write(json.dumps([operation, *arguments]) + "\n")
            self._process.stdin.flush()
            answer = self._read()
            assert "error" not in answer, answer
            return answer["result"]

        return call

    def _read(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class World:
    """A folder, and the processes that run there, for example a policy server, a driver and a robot.

    Attributes:
        folder: holds the configurations and, if a test saves a policy, ``policy.safetensors``.
        python: a Python with rclpy.
        environment: environment variables of the ROS processes.
    """

    def __init__(self, folder: Path, python: str, domain: int) -> None:
        self.folder = folder
        self.python = python
        self.environment = {
            **os.environ,
            "ROS_DOMAIN_ID": str(domain),
            "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
            "ROS_LOG_DIR": str(folder / "ros-log"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sims")]),
        }
        self.commands: list[Command] = []
        self.consoles: list[Console] = []

    def configure(self, file: str = "robot.yaml", **sections: Any) -> Path:
        """Write a configuration as JSON, which is valid YAML."""
        content = {"endpoints": {"policy": f"ipc://{self.folder / 'policy.sock'}"}, **sections}
        (self.folder / file).write_text(json.dumps(content))
        return self.folder / file

    def server(self, *arguments: str) -> Command:
        """Start a policy server, and wait until it serves."""
        command = Command(
            *("policy", "--bundle", "policy.safetensors", "--config", "robot.yaml", "--frozen", *arguments),
            cwd=self.folder,
        )
        self.commands.append(command)
        command.wait_for("serves policy.safetensors")
        return command

    def driver(self, *arguments: str, file: str = "robot.yaml", answer_s: float = 15) -> Command:
        """Start a driver. It waits ``answer_s`` seconds for the policy server's answer to a request from ROS."""
        words = (self.python, *program({"td3_robot.ros2.driver._ANSWER": answer_s}), "ros2", "driver")
        return self._start(words, "--config", file, *arguments)

    def ros_operator(self, *arguments: str) -> Command:
        """Start ``td3-robot ros2 operator``, and wait until it has taken over the robot."""
        words = (self.python, *program({"td3_robot.operators._SILENCE": 60}), "ros2", "operator")
        command = self._start(words, "--config", "robot.yaml", *arguments)
        command.wait_for("the ROS node /td3_robot_operator drives")
        return command

    def monitor(self, *arguments: str) -> Command:
        return self._start((self.python, "-m", "td3_robot.cli.main", "ros2", "monitor"), *arguments)

    def topics(self, *arguments: str) -> Command:
        """Start ``topics_node.py``, which plays or prints messages."""
        return self._start((self.python, str(HERE / "topics_node.py")), *arguments)

    def robot(self, *arguments: str) -> Command:
        """Start ``robot_node.py``, and wait until it publishes."""
        command = self._start((self.python, str(HERE / "robot_node.py")), *arguments)
        command.wait_for("^periods")
        return command

    def console(self, *namespaces: str) -> Console:
        self.consoles.append(Console(self, *(namespaces or ("/",))))
        return self.consoles[-1]

    def operator(self) -> Operator:
        """Return an operator that connects to the policy server as ``td3-robot node`` does."""
        return connect(f"ipc://{self.folder / 'policy.sock'}", timeout=60.0)

    def _start(self, program: tuple[str, ...], *arguments: str) -> Command:
        command = Command(*arguments, cwd=self.folder, program=program, environment=self.environment)
        self.commands.append(command)
        return command

    def close(self) -> None:
        for command in self.commands:
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGCONT)
            command.kill_all()
        for console in self.consoles:
            console.close()


@pytest.fixture
def world(tmp_path: Path, python: str, domain: int) -> Iterator[World]:
    made = World(tmp_path, python, domain)
    yield made
    made.close()


@pytest.fixture
def hip(world: World) -> World:
    """A world with a policy that brings the hip to 0: acceleration = tanh(-2 · angle - 2 · velocity)."""
    linear_policy(HIP, np.array([[-2.0, -2.0]], np.float32), world.folder / "policy.safetensors")
    world.configure(safety=SAFETY, ros2=HIP_SECTION)
    return world


def linear_policy(spec: RobotSpec, gains: Float32, file: Path) -> None:
    """Save a policy with action = tanh(gains · observation).

    Args:
        spec: specification of the robot. Its actions have the limits -1 and 1.
        gains: float32[A, O], for A actions and O observations.
    """
    size = spec.observation_size
    hidden = (2 * size,)  # one ReLU for the positive part of each observation, and one for its negative part
    tensors: Mapping[str, Any] = {name: np.zeros(shape, "f4") for name, shape in layer_shapes(spec, hidden).items()}
    tensors["actor.0.weight"][:] = np.concatenate([np.eye(size), -np.eye(size)])
    tensors["actor.1.weight"][:] = np.concatenate([gains, -gains], axis=1)
    Bundle(spec, hidden, dict(tensors), Exploration("none", 0.0), {"version": 1}).save(file)


def moves(console: Console, topic: str = "/commands", driver: str = f"/{DRIVER}") -> None:
    """Wait until a policy moves the robot. Activate the driver if it is ``inactive``.

    Late data can cause a fault of the driver, and ROS 2 reports a fault as ``inactive``.
    """

    def check() -> bool:
        if acts(console, driver):
            return True
        if console.state(driver) == "inactive":
            console.change(driver, "activate")
        return False

    poll_until(check, lambda: f"no policy moves the robot: {console.newest(f'{driver}/policy_state')}")
    # The console may discover the topic of the commands late.
    poll_until(lambda: console.newest(topic) is not None, lambda: f"no command has come on {topic}")


def acts(console: Console, driver: str = f"/{DRIVER}") -> bool:
    """Return whether a policy or an operator moves the robot."""
    state = console.newest(f"{driver}/policy_state")
    return bool(state and state["level"] == 0)
