"""The robots of a source as its core sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from td3_robot.messages import Phase
from td3_robot.specs import Float32, RobotSpec, UInt8, UInt32, UInt64


class Body(ABC):
    """N simulated robots, or one real robot (N = 1).

    Attributes:
        spec: specification of each robot.
        phase: uint8[N], as in a Step.
        episode: uint64[N], counts from 0.
        episode_step: uint32[N], control periods since FIRST.
        observation: float32[N, O]. O is the number of observation channels.
        reward: float32[N], 0 at FIRST.
        action: float32[N, A], the applied action. A is the number of action channels. At FIRST, this is the motor
            command at the start of the episode, or 0 in a simulator.
        world: the random properties of each robot at FIRST, as in a Step. The key is the robot's index as text;
            the value is a map from name to number.
        commanded: float32[N, A], the newest commanded action. In a simulator: the same as ``action``.
        prepared: whether the episode began with a reset, or the robots need no reset.
        resetting: whether a reset of a real robot has begun and not ended. The next ``step`` continues the reset.
            ``command`` interrupts it.
        problem: why the robots cannot work; empty if they can.
        stop: why the robots ask for an emergency stop of all robots; empty if they do not. The core clears this text.
    """

    def __init__(self, spec: RobotSpec, robots: int = 1) -> None:
        self.spec = spec
        self.phase: UInt8 = np.full(robots, Phase.TRUNCATED, np.uint8)
        self.episode: UInt64 = np.zeros(robots, np.uint64)
        self.episode_step: UInt32 = np.zeros(robots, np.uint32)
        self.observation: Float32 = np.zeros((robots, spec.observation_size), np.float32)
        self.reward: Float32 = np.zeros(robots, np.float32)
        self.action: Float32 = np.zeros((robots, spec.action_size), np.float32)
        self.world: dict[str, dict[str, float]] = {}
        self.stop = ""
        self.prepared = True
        self.commanded: Float32 = np.clip(np.zeros_like(self.action), spec.action_low, spec.action_high)

    @property
    def problem(self) -> str:
        return ""

    @property
    def resetting(self) -> bool:
        return False

    def command(self, action: Float32) -> None:  # noqa: B027
        """Apply ``action``, float32[N, A], from now on.

        A simulator ignores this call: it applies the action that ``step`` gets.
        """

    @abstractmethod
    def step(self, action: Float32, may_reset: bool = True) -> int | None:
        """End a control period in which the robots apply ``action``, float32[N, A].

        A simulator simulates the whole period here. If a robot's episode ended before this control period, the method
        resets this robot instead.

        Args:
            may_reset: whether the method is allowed to reset a real robot. If False, a real robot begins its episodes
                without a reset. A simulator ignores this value.

        Returns:
            The number of transitions: one for each robot that did not begin an episode. None if there is no observation
            to publish, for example because the robot is ``resetting``.
        """
