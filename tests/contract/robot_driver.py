"""Contract tests for robot drivers. To test a driver, subclass the suite and return the driver's robot:

class TestLeg(RobotContract):
    @pytest.fixture
    def robot(self) -> Robot:
        return Leg()

The suite moves the robot: it applies the lowest, the highest and the safe action.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from td3_robot.driver.guard import Guard
from td3_robot.driver.hang import EXIT_HUNG, HangWatch
from td3_robot.driver.robot import Robot, RobotBody
from td3_robot.messages import Phase
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Float32, RobotSpec

PERIODS = 5
_PATIENCE = 60.0  # s


class RobotContract:
    """Each test uses a new robot."""

    @pytest.fixture
    def robot(self) -> Robot:
        raise NotImplementedError("return a robot")

    def test_specification_survives_a_round_trip(self, robot: Robot) -> None:
        spec = robot.spec
        assert RobotSpec.from_description(spec.describe()) == spec
        assert spec.control_period > 0
        assert np.isfinite([spec.action_low, spec.action_high]).all()
        assert (spec.action_low < spec.action_high).all()

    def test_observations_are_finite_copies(self, robot: Robot) -> None:
        """A later observation does not change an earlier one."""
        reset(robot)
        first = robot.observe()
        copy = np.array(first)
        for _ in range(PERIODS):
            robot.apply(robot.spec.action_high.copy())
            seen = np.asarray(robot.observe())
            assert seen.shape == (robot.spec.observation_size,)
            assert np.isrealobj(seen)
            assert np.isfinite(seen.astype(np.float32)).all()
        assert np.array_equal(first, copy)

    def test_extreme_and_safe_actions_are_accepted_and_not_changed(self, robot: Robot) -> None:
        reset(robot)
        for action in (robot.spec.action_low, robot.spec.action_high, safe_action(robot)):
            given = action.copy()
            robot.apply(given)
            assert np.array_equal(given, action), "apply() changed its argument"

    def test_reward_and_phase_are_valid_after_a_period(self, robot: Robot) -> None:
        reset(robot)
        action = safe_action(robot)
        robot.apply(action)
        observation = np.asarray(robot.observe(), np.float32)
        assert Phase(robot.phase(observation)) in (Phase.MID, Phase.TERMINATED, Phase.TRUNCATED)
        assert np.isfinite(float(robot.reward(observation, action)))

    def test_robot_makes_episodes(self, robot: Robot) -> None:
        """The driver first resets the robot and reports FIRST. Each period without a reset gives one transition."""
        body = RobotBody(robot)
        body.command(safe_action(robot)[None])
        assert step(body) == 0
        assert (body.phase.tolist(), body.problem, body.stop) == ([Phase.FIRST], "", "")
        for _ in range(PERIODS):
            was_over = body.phase[0] >= Phase.TERMINATED
            assert step(body) == (0 if was_over else 1)
            assert (body.problem, body.stop) == ("", "")
            assert np.isfinite(body.observation).all()
        body.close()
        assert body.problem == ""

    def test_reset_can_be_repeated(self, robot: Robot) -> None:
        for _ in range(2):
            reset(robot)
            assert np.isfinite(np.asarray(robot.observe(), np.float32)).all()

    def test_robot_can_be_stopped_twice_and_closed(self, robot: Robot) -> None:
        """In a hang, another thread calls stop(). Neither this call nor a second call raises an error."""
        reset(robot)
        errors: list[BaseException] = []

        def stop() -> None:
            try:
                robot.stop()
                robot.stop()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        assert not thread.is_alive()
        assert not errors
        robot.close()

    def test_hang_stops_the_robot_and_ends_the_process(self, robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
        """observe() hangs. If the robot defines stop(), the driver calls it. The driver then ends with exit code 70."""
        codes: queue.Queue[int] = queue.Queue()
        ended = threading.Event()
        stops: list[Callable[[], None] | None] = []

        def end(code: int) -> None:
            codes.put(code)
            ended.set()

        def watch(limit: float, stop: Callable[[], None] | None) -> HangWatch:
            stops.append(stop)
            return HangWatch(limit, stop, end)

        def hang() -> Float32:
            assert ended.wait(_PATIENCE)
            return np.zeros(robot.spec.observation_size, np.float32)

        monkeypatch.setattr("td3_robot.driver.robot.HangWatch", watch)
        monkeypatch.setattr(robot, "observe", hang)
        body = RobotBody(robot, hang_s=0.5)
        step(body)
        assert codes.get(timeout=_PATIENCE) == EXIT_HUNG
        assert stops == [robot.stop if type(robot).stop is not Robot.stop else None]


def reset(robot: Robot) -> None:
    """Call ``reset`` of the robot, and make one part in each control period."""
    for _ in robot.reset() or ():
        time.sleep(robot.spec.control_period)


def step(body: RobotBody) -> int | None:
    """Make control periods until no reset continues. Return the result of the last period."""
    made = body.step(body.commanded)
    while body.resetting:
        time.sleep(body.spec.control_period)
        made = body.step(body.commanded)
    return made


def safe_action(robot: Robot) -> Float32:
    """Return the action that a driver applies in FAULT with ``safe_action: zero``: one number for each channel."""
    guard = Guard(robot.spec, "robot", SafetyConfig(safe_action="zero"))
    safe: Float32 = guard.envelope.safe_action(np.zeros((1, robot.spec.action_size), np.float32))[0]
    return safe
