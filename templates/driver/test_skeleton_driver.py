"""Tests of the driver of the robot "skeleton". They move the robot, so run them with a simulated robot.

python -m pytest test_skeleton_driver.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from skeleton_driver import SkeletonDriver

FOLDER = Path(__file__).parent


def test_observations_are_within_the_specification() -> None:
    robot = SkeletonDriver()
    robot.reset()
    low, high = ([getattr(channel, end) for channel in robot.spec.observations] for end in ("low", "high"))
    for action in (robot.spec.action_low, robot.spec.action_high):
        robot.apply(action)
        observation = robot.observe()
        assert observation.shape == (robot.spec.observation_size,)
        assert np.all((low <= observation) & (observation <= high))
    robot.close()


def test_driver_follows_the_protocol(tmp_path: Path) -> None:
    """`td3-robot bench conformance` acts as the policy server, and prints what is wrong."""
    endpoint = f"ipc://{tmp_path}/policy"
    # Long deadlines, because a test machine may be busy.
    settings = [f"endpoints.policy={endpoint}", "safety.action_deadline_ms=5000", "safety.hang_ms=10000"]
    words = ["skeleton_driver.py", "--config", "robot.yaml", *(word for item in settings for word in ("--set", item))]
    with subprocess.Popen([sys.executable, *words], cwd=FOLDER) as driver:
        check = [sys.executable, "-m", "td3_robot", "bench", "conformance", endpoint, "--deadline", "20"]
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        driver.terminate()
    assert done.returncode == 0, done.stdout + done.stderr
