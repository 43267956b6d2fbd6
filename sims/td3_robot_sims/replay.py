"""Replays the simulator's core. The core must produce the recorded messages of the topics in TOPICS."""

from __future__ import annotations

from td3_robot.messages import Command, LifecycleChange, Reply, SimulatorState, Step
from td3_robot.recording.boundary import RecordedCore
from td3_robot.recording.reader import Session
from td3_robot.replay import lives
from td3_robot.replay.lives import Life, Memory
from td3_robot.replay.outcome import Outcome
from td3_robot_sims import simulator, tasks
from td3_robot_sims.core import SimulatorCore

TOPICS = (Step.NAME, LifecycleChange.NAME, Reply.NAME, Command.NAME, SimulatorState.NAME)
"""The topics of all messages that the simulator's core can send. Replay compares these topics."""


def replay(session: Session) -> Outcome:
    """Replay every simulator that was recorded from the start of its process.

    Raises:
        SessionError: the recording is damaged, or cannot come from a simulator.
        ConfigError: a recorded task needs a module that this process has not imported, or this installation cannot make
            the task.
    """
    made: list[SimulatorCore] = []

    def make(life: Life, memory: Memory) -> RecordedCore:
        del memory
        tasks.refuse_import(life.config.task, "recording", "--import {module}")
        life.packages = tuple(sorted(tasks.find(life.config.task)[0].packages))
        made.append(simulator.make(life.config, life.name, life.incarnation))
        return RecordedCore(made[-1], life)

    try:
        found, notes = lives.replay(session, "simulator", TOPICS, make)
    finally:
        for core in made:
            core.envs.close()
    return lives.outcome(found.values(), TOPICS, notes)
