"""Real ROS 2 nodes in separate processes. Each test has a ROS domain of its own, on this machine only."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_DOMAINS = range(1, 102)
"""Domain numbers whose ports are outside the range of ephemeral ports of Linux."""


@functools.cache
def ros_python() -> str | None:
    """Return TD3_ROBOT_ROS2_PYTHON, the Python of ``make test-all``, or this one, if it has rclpy; None if none has."""
    made = Path(sys.prefix) / "ros2" / "bin" / "python"
    for python in (os.environ.get("TD3_ROBOT_ROS2_PYTHON"), str(made) if made.exists() else None, sys.executable):
        if python and subprocess.run([python, "-c", "import rclpy"], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.fixture
def python() -> str:
    found = ros_python()
    if found is None:
        pytest.skip("rclpy is not installed: run make test-all, or set TD3_ROBOT_ROS2_PYTHON to a Python that has it")
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
