"""Creates the core of a learner for this machine. This module measures the machine and loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from td3_robot.config.schema import Config
from td3_robot.learner import compute
from td3_robot.learner.contract import load
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.learner.resources import Networks
from td3_robot.learner.training import Training
from td3_robot.specs import RobotSpec


def networks(config: Config, spec: RobotSpec) -> Networks:
    """The sizes of an algorithm's networks. The function builds the networks to count their parameters."""
    learner = config.learner
    algorithm = load(learner.algorithm)(
        spec.observation_size,
        spec.action_size,
        config.network.hidden,
        learner,
        seed=0,
        options=getattr(config, learner.algorithm, None),
    )
    return Networks(*algorithm.sizes(), algorithm.consumes == "transitions")


def make_core(
    config: Config,
    *,
    provenance: Mapping[str, Any] | None = None,
    storage: Callable[[int, int], Storage] = Storage,
    admit: Callable[[RobotSpec], None] = lambda _: None,
) -> LearnerCore:
    """A learner's core whose training uses the device and precision of this machine.

    Args:
        config: configuration of the run. The function replaces ``auto`` in device and precision.
        provenance: origin of the policies; every policy bundle contains it.
        storage: creates the storage of the replay buffer from the capacity and the row width.
        admit: checks the robot before the core allocates memory. It may raise an error.

    Raises:
        ConfigError: this machine does not support the configured device or precision.
    """
    device = compute.device(config.learner.device)
    precision = compute.precision(config.learner.precision, device)  # only ``auto`` needs a measurement
    config = replace(config, learner=replace(config.learner, device=device.type, precision=precision))

    def make_training(spec: RobotSpec) -> Training:
        admit(spec)
        return Training(spec, config, storage)

    return LearnerCore(config, make_training, provenance or {})
