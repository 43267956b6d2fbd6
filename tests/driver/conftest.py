"""Fixtures for tests of the driver: its core with a toy robot."""

from __future__ import annotations

import pytest

from td3_robot.driver.core import SourceCore
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import RealTime
from td3_robot.driver.robot import RobotBody
from td3_robot.messages import Welcome
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from tests.driver.toy import SAFE, Make, Toy


@pytest.fixture
def robot(spec: RobotSpec) -> Toy:
    return Toy(spec)


@pytest.fixture
def make_core(robot: Toy) -> Make:
    def make(
        safety: SafetyConfig = SAFE, *, learner: bool = False, autostart: bool = True, welcomed: bool = True
    ) -> SourceCore:
        guard = Guard(robot.spec, "leg", safety, autostart=autostart)
        pacing = RealTime(robot.spec, "hold")
        core = SourceCore(
            RobotBody(robot),
            "leg",
            2,
            lockstep=False,
            pacing=pacing,
            guard=guard,
            learner=learner,
            driver=True,
        )
        if welcomed:
            core.step([("policy", Welcome(1, "policy", 5))], 0.0)
        return core

    return make
