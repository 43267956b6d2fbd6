"""The pytest plugin in a user's project: pytest runs ``examples/recording_test``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from td3_robot.bundle import Bundle
from td3_robot.messages import ActionOrigin, Phase
from td3_robot.policy.core import PolicyCore
from td3_robot.replay import pytest_plugin
from td3_robot.specs import RobotSpec
from td3_robot.testing import FakeRobot, ManualClock

ROOT = Path(__file__).parent.parent.parent
RECORDING = ROOT / "tests" / "replay" / "sessions" / "pendulum.mcap"


def run(project: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "td3_robot.replay.pytest_plugin", "-v", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / "recording_test", tmp_path / "example"))


def test_the_example_project_passes_and_then_reports_a_damaged_recording(project: Path) -> None:
    sessions = project / "tests" / "sessions"
    shutil.copy(RECORDING, sessions)
    (project / "tests" / "elsewhere.mcap").write_text("not in the folder, so the plugin ignores it")
    result = run(project)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "pendulum.mcap::replay PASSED" in result.stdout
    assert "5 passed" in result.stdout
    octets = RECORDING.read_bytes()
    (sessions / "pendulum.mcap").write_bytes(octets[: len(octets) // 2])
    result = run(project)
    assert result.returncode == 1
    assert "pendulum.mcap::replay FAILED" in result.stdout
    assert "is damaged at byte" in result.stdout


def test_a_folder_without_any_collected_recording_is_an_error(project: Path) -> None:
    sessions = project / "tests" / "sessions"
    result = run(project)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: td3_robot_sessions: {str(sessions)!r} holds no recordings (*.mcap)" in result.stderr
    (sessions / "broken.mcap").symlink_to("annex/broken.mcap")
    result = run(project)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "broken.mcap' is a link to 'annex/broken.mcap', which does not exist" in result.stderr
    (sessions / "broken.mcap").unlink()
    (sessions / "build").mkdir()
    shutil.copy(RECORDING, sessions / "build")
    result = run(project)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "pendulum.mcap': norecursedirs has 'build'" in result.stderr
    shutil.rmtree(sessions / "build")
    (sessions / ".gitkeep").unlink()
    sessions.rmdir()
    result = run(project)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: td3_robot_sessions: {str(sessions)!r} is not a folder" in result.stderr


def test_a_symbolic_link_to_a_recording_elsewhere_is_collected_as_a_test(project: Path, tmp_path: Path) -> None:
    (tmp_path / "annex").write_bytes(RECORDING.read_bytes()[:1000])
    (project / "tests" / "sessions" / "linked.mcap").symlink_to(tmp_path / "annex")
    result = run(project)
    assert result.returncode == 1
    assert "linked.mcap::replay FAILED" in result.stdout
    assert "is damaged at byte" in result.stdout


def test_pytest_finds_the_plugin_of_the_installed_package() -> None:
    (found,) = entry_points(group="pytest11", name="td3_robot")
    assert found.value == pytest_plugin.__name__


def test_a_difference_is_shown_as_the_replay_command_shows_it(project: Path) -> None:
    """The test changes the code: it halves the noise of the policy server."""
    shutil.copy(RECORDING, project / "tests" / "sessions")
    (project / "tests" / "conftest.py").write_text(
        "from td3_robot.policy.noise import Noise\n"
        "drawn = Noise.__call__\n"
        "Noise.__call__ = lambda self, *when: drawn(self, *when) * 0.5\n"
    )
    result = run(project)
    assert result.returncode == 1
    assert "policy: action DIFFERS" in result.stdout
    assert "if you changed this on purpose: td3-robot replay" in result.stdout
    assert "Traceback" not in result.stdout


def test_fake_robot_behaves_like_one_robot_with_several_episodes(
    make_bundle: Callable[..., Bundle], spec: RobotSpec
) -> None:
    core = PolicyCore(0)
    core.load(1, make_bundle())
    clock = ManualClock(5.0)
    robot = FakeRobot(core, spec, clock)
    first = robot.observe(np.zeros(3, np.float32))
    second = robot.observe(np.ones(3, np.float32), 1.5, Phase.TERMINATED)
    third = robot.observe(np.zeros(3, np.float32))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.answers, second.answers, third.answers) == (0, 1, 2)
    assert np.array_equal(first.action, third.action)
    steps = robot.steps
    assert [step.phase[0] for step in steps] == [Phase.FIRST, Phase.TERMINATED, Phase.FIRST]
    assert [step.episode[0] for step in steps] == [0, 0, 1]
    assert [step.episode_step[0] for step in steps] == [0, 1, 0]
    assert [step.transitions for step in steps] == [0, 1, 1]
    assert [step.origin for step in steps] == [ActionOrigin.NONE, ActionOrigin.POLICY, ActionOrigin.NONE]
    with pytest.raises(ValueError, match="FIRST in the middle of an episode; allowed: MID, TERMINATED, TRUNCATED"):
        robot.observe(np.zeros(3, np.float32), phase=Phase.FIRST)
    assert len(steps) == 3
    assert np.array_equal(steps[1].action, first.action)
    assert steps[2].stamp == pytest.approx((5.0 + 3 * 0.02) * 1e9, abs=1)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
