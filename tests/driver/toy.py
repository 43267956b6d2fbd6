"""A robot without hardware for tests of the driver, and helpers for the driver's inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from td3_robot.core_types import Output
from td3_robot.driver.core import SourceCore
from td3_robot.driver.robot import Robot
from td3_robot.messages import Action, Command, LifecycleChange, Phase, Step
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Float32, RobotSpec

PERIOD = 0.02  # s, of the toy robot
SAFE = SafetyConfig(safe_action={"left": 0.25}, action_deadline_ms=50)

Make = Callable[..., SourceCore]


class Toy(Robot):
    """A robot that records its actions.

    Attributes:
        sees: what ``observe`` returns. If this is an exception, ``observe`` raises it.
        motor: an exception that ``apply`` raises, or None.
        ends: the phase after each control period.
        observed: number of calls of ``observe``.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self.spec = spec
        self.sees: Any = [1.0, 2.0, 3.0]
        self.motor: Exception | None = None
        self.ends = Phase.MID
        self.applied: list[list[float]] = []
        self.observed = 0

    def observe(self) -> Float32:
        self.observed += 1
        if isinstance(self.sees, Exception):
            raise self.sees
        return np.array(self.sees, np.float32)

    def apply(self, action: Float32) -> None:
        if self.motor:
            raise self.motor
        self.applied.append(action.tolist())

    def phase(self, observation: Float32) -> Phase:
        del observation
        return self.ends

    def reward(self, observation: Float32, action: Float32) -> float:
        return float(observation[0] + action[0])


class Resettable(Toy):
    """A robot with a reset.

    Attributes:
        resets: number of calls of ``reset``.
        on_reset: a function that ``reset`` calls.
    """

    def __init__(self, spec: RobotSpec) -> None:
        super().__init__(spec)
        self.resets = 0
        self.on_reset: Callable[[], object] = lambda: None

    def reset(self) -> None:
        self.resets += 1
        self.on_reset()


class Homing(Toy):
    """A robot with a reset that the driver can interrupt.

    Attributes:
        parts: number of parts of a reset, each with a ``yield``.
        on_part: a function that each part calls, with the number of the part.
        events: the parts and the ends of resets, and the calls of ``apply`` (``command``).
    """

    def __init__(self, spec: RobotSpec) -> None:
        super().__init__(spec)
        self.parts = 10
        self.on_part: Callable[[int], object] = lambda _: None
        self.events: list[str] = []

    def apply(self, action: Float32) -> None:
        super().apply(action)
        self.events.append("command")

    def reset(self) -> Generator[None]:
        try:
            for number in range(self.parts):
                self.events.append(f"part {number}")
                self.on_part(number)
                yield
            self.events.append("end")
        except GeneratorExit:
            self.events.append("interrupted")
            raise


def action(answers: int, *values: float, version: int = 7) -> tuple[str, Action]:
    return "policy", Action("leg", 2, answers, 0, np.array([values], np.float32), version, 0, 0)


def operator(verb: str) -> tuple[str, Command]:
    return "policy", Command(5, "", verb, "", 0, "", b"")


def one(outputs: list[Output]) -> Step:
    [step] = [message for to, message in outputs if isinstance(message, Step) and to == "policy"]
    return step


def stops(outputs: list[Output]) -> list[str]:
    return [message.reason for _, message in outputs if isinstance(message, Command) and message.verb == "estop"]


def states(outputs: list[Output]) -> list[str]:
    return [message.state for _, message in outputs if isinstance(message, LifecycleChange)]
