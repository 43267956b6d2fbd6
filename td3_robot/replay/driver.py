"""Replays the driver's core. A robot with the recorded observations and reports replaces the real robot.

The core must produce the recorded Steps, states, Replies and Commands, and give the robot the recorded motor commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td3_robot.driver import core as driver_core
from td3_robot.driver.body import Body
from td3_robot.errors import ConfigError, SessionError
from td3_robot.messages import Command, LifecycleChange, Message, MotorCommand, Phase, Reply, RobotReport, Step
from td3_robot.recording.boundary import RESETTING, RecordedBody, RecordedCore
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.replay import lives
from td3_robot.replay.lives import Life, Memory
from td3_robot.replay.outcome import Outcome
from td3_robot.specs import Float32, RobotSpec

TOPICS = (Step.NAME, LifecycleChange.NAME, Reply.NAME, Command.NAME, RobotReport.NAME, MotorCommand.NAME)


class ReplayedBody(Body):
    """A robot with the recorded observations and failures. Actions change only ``commanded`` and ``action``.

    Args:
        recorded: the recorded messages of the driver, by topic. The lists grow while replay reads the recording.
    """

    def __init__(self, spec: RobotSpec, recorded: Mapping[str, list[tuple[Entry, Message, int]]]) -> None:
        super().__init__(spec)
        self._steps, self._reports = recorded[Step.NAME], recorded[RobotReport.NAME]
        self._calls = self._taken = self._next_report = 0
        self._newest_report = RobotReport(0, 0, "", "")

    @property
    def problem(self) -> str:
        return self._newest_report.trouble

    @property
    def resetting(self) -> bool:
        return self._newest_report.refused == RESETTING

    def command(self, action: Float32) -> None:
        self._report()
        self.commanded = action.copy()

    def step(self, action: Float32, may_reset: bool = True) -> int | None:
        del may_reset  # the report says whether the robot was reset
        self._report()
        if self._newest_report.refused:
            return None
        if self._taken == len(self._steps):  # no recorded Step is left; the comparison of Steps reports this
            self.phase[:] = Phase.MID
            return 1
        step = self._steps[self._taken][1]
        assert isinstance(step, Step)
        self._taken += 1
        self.phase, self.episode, self.episode_step = step.phase.copy(), step.episode.copy(), step.episode_step.copy()
        self.observation, self.reward = step.observation.copy(), step.reward.copy()
        first = bool(self.phase[0] == Phase.FIRST)
        self.action[0] = self.commanded[0] if first else action[0]
        return 0 if first else 1

    def _report(self) -> None:
        """Count a call to the robot. Then use the newest report that was recorded up to this call."""
        self._calls += 1
        while self._next_report < len(self._reports):
            report = self._reports[self._next_report][1]
            assert isinstance(report, RobotReport)
            if report.call > self._calls:
                break
            self._newest_report = report
            self._next_report += 1
        self.stop, self.prepared = self._newest_report.stop, not self._newest_report.unprepared


def replay(session: Session) -> Outcome:
    """Replay every driver whose first turn is recorded."""
    found, notes = lives.replay(session, "driver", TOPICS, _make)
    return lives.outcome(found.values(), TOPICS, notes)


def _make(life: Life, memory: Memory) -> RecordedCore:
    del memory
    try:
        spec = RobotSpec.from_description(life.setting("spec", dict))
    except ConfigError as error:
        raise SessionError(f"start of {life}: {error}") from None
    body: Any = RecordedBody(ReplayedBody(spec, life.recorded))
    core = driver_core.make(body, life.config, life.name, life.incarnation, learner=life.setting("learner", bool))
    return RecordedCore(core, life, body.observe)
