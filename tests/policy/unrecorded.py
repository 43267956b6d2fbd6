"""The policy server's core as its peers see it."""

from __future__ import annotations

from collections.abc import Sequence

from td3_robot.core_types import Input, Output
from td3_robot.policy import core
from td3_robot.topics import RECORDER


class PolicyCore(core.PolicyCore):
    """Without what it says to the recorder alone, so that a test can take its outputs apart."""

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        return [(to, message) for to, message in super().step(inputs, now) if to != RECORDER]
