"""Makes the core of a learner for this machine: everything that measures, compiles or loads torch starts here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from td3_robot.config.schema import Config
from td3_robot.learner import machine_choices
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.learner.training import Training
from td3_robot.specs import RobotSpec


def make_core(
    config: Config,
    *,
    spec: RobotSpec | None = None,
    provenance: Mapping[str, Any] | None = None,
    storage: Callable[[int, int], Storage] = Storage,
    admit: Callable[[RobotSpec], None] = lambda _: None,
) -> LearnerCore:
    """A learner's core whose training uses the device and precision of this machine.

    Args:
        config: of the run; ``auto`` is replaced.
        spec: of the robot, if it is known before a simulator joins.
        provenance: stored in each policy bundle.
        storage: makes the storage of the replay buffer from its capacity and row width.
        admit: called with the robot's specification before anything is allocated; it may raise.

    Raises:
        ConfigError: this machine lacks the device or precision.
    """
    config = machine_choices.resolve_here(config)

    def make_training(spec: RobotSpec) -> Training:
        admit(spec)
        return Training(spec, config, storage)

    return LearnerCore(config, make_training, spec=spec, provenance=provenance)
