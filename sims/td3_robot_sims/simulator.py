"""A simulator for a run: its robots, and the core that drives them."""

from __future__ import annotations

import msgspec

from td3_robot.config.schema import Config
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import RealTime
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.core import SimulatorCore
from td3_robot_sims.vector_env import VectorEnvironment


def make(config: Config, name: str, incarnation: int) -> SimulatorCore:
    """Make the core of a simulator. The caller must close the ``envs`` of the core."""

    def environment(seed: int) -> Environment:
        return tasks.make(config.task, seed, config.randomization)

    envs = VectorEnvironment(environment, config.robots, config.seed, name, incarnation)
    safety, pacing = config.safety, None
    if config.pacing.mode == "realtime":
        pacing = RealTime(envs.spec, config.pacing.fallback)
    else:  # the simulation waits for Actions, so it needs no action deadline
        safety = msgspec.structs.replace(safety, action_deadline_ms=None)
    return SimulatorCore(
        envs,
        name,
        incarnation,
        lockstep=config.timing == "lockstep",
        pacing=pacing,
        guard=Guard(envs.spec, name, safety),
    )
