"""``Robot``: the base class that the author of a driver extends. ``RobotBody``: the adapter to the driver's core."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np

from td3_robot.driver.body import Body
from td3_robot.driver.hang import HangWatch
from td3_robot.messages import Phase
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util.text import occurrence

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_END = object()


class EmergencyStop(Exception):  # noqa: N818 - not an error: a person or the robot asks for the stop
    """Any method except ``stop`` and ``close`` may raise this. It stops all robots of the same policy server."""


class Robot(ABC):
    """A robot. One thread calls all methods except ``stop``.

    ``observe``, ``apply``, ``reward`` and ``phase`` together should need much less than a control period. If a method
    raises an exception, the driver goes to FAULT, and applies the safe action in every period.

    Attributes:
        spec: the robot's channels, in the order of the arrays, and its control period.
    """

    spec: RobotSpec

    @abstractmethod
    def observe(self) -> Float32:
        """Return float32[O]: the value of each observation channel, in the channel's unit; NaN for a failed sensor.

        The driver can call this before the first ``reset``.
        """

    @abstractmethod
    def apply(self, action: Float32) -> None:
        """Command the motors. The command holds until the next call.

        Args:
            action: float32[A], one value for each action channel, in the units and limits of the specification.
        """

    def reward(self, observation: Float32, action: Float32) -> float:
        """Return the reward of the last control period, for a learner.

        Args:
            observation: float32[O], at the end of the period.
            action: float32[A], the action of the period.
        """
        del observation, action
        return 0.0

    def phase(self, observation: Float32) -> Phase:
        """Return the phase of the episode after ``observation``, float32[O].

        Returns:
            MID: the episode continues. TERMINATED: the task has ended, for example by a fall. TRUNCATED: the episode
            ends for another reason, for example a time limit.
        """
        del observation
        return Phase.MID

    def reset(self) -> Iterator[Any] | None:  # noqa: B027 - many robots need no preparation
        """Prepare an episode; this can move the robot. The driver calls it before every episode of a policy.

        The driver calls this method only while its state is ``active``, and after the policy server has answered a
        Step or sent an ``activate``. In all other cases, for example in FAULT and at the start, an episode begins
        without this call. Such an episode gets only the safe action. The driver ends the episode as soon as it is
        allowed to call this method.

        A reset that moves the robot should be a generator::

            def reset(self):
                for angle in np.linspace(self.angle(), 0.0, 100):
                    self.move_to(angle)
                    yield

        After each ``yield``, the driver continues this method in the next control period. A part is the code up to the
        next ``yield``. Between two parts, the driver obeys commands and signals. If the driver leaves the state
        ``active``, gets a Welcome or ends, it interrupts the reset: the current ``yield`` raises GeneratorExit. Then
        the driver applies the safe action. The limit ``safety.hang_ms`` holds for each part, and for the clean-up in
        ``finally``. The clean-up must not move the robot, and must not ``yield``.

        Nothing interrupts a reset without ``yield``, not even an emergency stop.

        The driver applies the safe action before it calls this method. If a reset lasts longer than
        ``safety.reset_timeout_ms``, the policy server goes to FAULT, provided ``safety.observation_deadline_ms`` is
        set. The driver interrupts a reset with ``yield`` after the same time and goes to FAULT, provided
        ``safety.action_deadline_ms`` is set.
        """

    def stop(self) -> None:  # noqa: B027
        """Bring the robot to rest. The driver calls this when a method has been running longer than ``safety.hang_ms``.

        This limit holds for ``observe``, ``apply``, ``phase``, ``reward`` and each part of a ``reset`` with ``yield``.
        Another thread calls ``stop`` **while the hanging method is running**. Then the driver ends. Write ``stop`` only
        if it can work without the hanging device, for example through an enable line or a second handle on the bus. A
        second call of ``stop`` must do no harm.
        """

    def close(self) -> None:  # noqa: B027
        """Release the robot. The driver calls this when it ends, after it has applied the safe action.

        If another driver of the same name is possibly using the robot, the driver does not call ``close``.
        """


class RobotBody(Body):
    """Adapts a :class:`Robot` to :class:`td3_robot.driver.body.Body`.

    If a method of the Robot raises an :class:`EmergencyStop`, this class stores the stop. If a method raises another
    exception, this class stores a problem.

    A missing or invalid observation ends the episode as TRUNCATED. The last Step of this episode repeats the last valid
    observation. The next valid observation begins a new episode.

    Args:
        hang_s: time limit (s) for ``observe``, for ``apply``, and for ``phase`` plus ``reward``, see
            :class:`HangWatch`; None: no limit. If ``reset`` is a generator, the limit also holds for each of its parts.
    """

    def __init__(self, robot: Robot, hang_s: float | None = None) -> None:
        super().__init__(robot.spec)
        self._robot = robot
        # Without a ``reset``, every episode is prepared.
        self._resets = getattr(robot.reset, "__func__", None) is not Robot.reset
        self._is_reset = False  # whether the robot was reset for an episode that has not begun
        self._parts: Iterator[Any] | None = None  # the rest of the running reset
        stop = robot.stop if type(robot).stop is not Robot.stop else None
        self._hang = HangWatch(hang_s, stop) if hang_s is not None else None
        self._problems: dict[str, str] = {}
        self._troubles: Counter[str] = Counter()
        self._begun = False

    @property
    def problem(self) -> str:
        return "" if self.resetting else "; ".join(self._problems.values())  # the reset may end the problems

    @property
    def resetting(self) -> bool:
        return self._parts is not None

    def command(self, action: Float32) -> None:
        self._interrupt_reset()
        self.commanded = action.copy()
        self._ask("apply", lambda: self._robot.apply(action[0].copy()))

    def step(self, action: Float32, may_reset: bool = True) -> int | None:
        if self.phase[0] >= Phase.TERMINATED:
            return self._begin(may_reset and not self.stop)
        observation = self._observe()
        self.action[0] = action[0]
        self.episode_step += np.uint32(1)
        if observation is None:
            self.phase[0], self.reward[0] = Phase.TRUNCATED, 0
            return 1
        self.observation[0] = observation
        self.phase[0], self.reward[0] = self._judged(observation, self.action[0])
        if may_reset and not self.prepared:  # the reset comes next
            self._forgive()
            if self.phase[0] == Phase.MID:
                self.phase[0] = Phase.TRUNCATED
        return 1

    def close(self) -> None:
        self._ask("close", self._robot.close, limited=False)

    def _begin(self, may_reset: bool) -> int | None:
        """Begin an episode. Return 0, or None if the reset continues, or if the reset or the observation failed."""
        if may_reset and not self._is_reset:
            self._is_reset = self._continue_reset()
            if not self._is_reset:
                return None
            self._forgive()
        if not may_reset:
            self._problems.pop("reset", None)  # this episode begins without a reset
        observation = self._observe()
        if observation is None:
            return None
        self.episode += np.uint64(self._begun)
        self.observation[0], self.phase[0], self.episode_step[0] = observation, Phase.FIRST, 0
        self.reward[0], self.action[0], self._begun = 0, self.commanded[0], True
        self.prepared, self._is_reset = self._is_reset or not self._resets, False
        return 0

    def _continue_reset(self) -> bool:
        """Begin a reset, or run its next part. Return whether the reset has ended without a problem."""

        def begin() -> Iterator[Any]:
            result = self._robot.reset()
            return result if isinstance(result, Iterator) else iter(())

        parts = self._parts
        if parts is None:
            parts = self._ask("reset", begin, limited=False)
        ended = None if parts is None else self._ask("reset", partial(_ends, parts))
        self._parts = parts if ended is False else None  # after an exception, a generator cannot continue
        return bool(ended)

    def _interrupt_reset(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            log.warning("the driver interrupts reset()")
            self._ask("reset", getattr(parts, "close", lambda: None))

    def _forgive(self) -> None:
        """Forget the problems that a reset can end. Otherwise they would lead to FAULT before or after the reset."""
        for what in ("apply", "phase() or reward"):
            self._problems.pop(what, None)

    def _observe(self) -> Float32 | None:
        def sound() -> Float32:
            given = np.asarray(self._robot.observe())
            if np.iscomplexobj(given):
                raise ValueError("the observation is complex; allowed: real numbers")
            observation = given.astype(np.float32)
            if observation.shape != (self.spec.observation_size,):
                raise ValueError(
                    f"the observation has the shape {list(observation.shape)}; expected [{self.spec.observation_size}]"
                )
            bad = np.flatnonzero(~np.isfinite(observation))
            if len(bad):
                raise ValueError(f"{self.spec.observations[bad[0]].name!r} is {observation[bad[0]]}")
            return observation

        return self._ask("observe", sound)

    def _judged(self, observation: Float32, action: Float32) -> tuple[int, float]:
        def outcome() -> tuple[int, float]:
            phase, reward = int(self._robot.phase(observation)), float(self._robot.reward(observation, action))
            if phase not in (Phase.MID, Phase.TERMINATED, Phase.TRUNCATED) or not np.isfinite(reward):
                raise ValueError(
                    f"phase is {phase}, reward is {reward}; "
                    "the phase must be MID, TERMINATED or TRUNCATED, and the reward must be finite"
                )
            return phase, reward

        otherwise = (int(Phase.TRUNCATED if self.prepared else Phase.MID), 0.0)
        return self._ask("phase() or reward", outcome, tolerated=not self.prepared) or otherwise

    def _ask(
        self, what: str, call: Callable[[], Answer], *, tolerated: bool = False, limited: bool = True
    ) -> Answer | None:
        """Call the robot's code and return its result.

        If the code raises an exception, store the problem or the emergency stop, and return None. If ``tolerated``, an
        exception is not a problem: for example, ``phase`` can fail before the first ``reset``. If ``limited``, the time
        limit for hanging methods holds.
        """
        try:
            answer = self._hang.run(what, call) if self._hang and limited else call()
        except EmergencyStop as stop:
            self.stop = str(stop) or "the robot stopped"
        except Exception as error:  # an error of the robot's code must not end the loop that keeps the robot safe
            if tolerated:
                return None
            problem = f"{what}: {type(error).__name__}: {error}"
            if what not in self._problems:
                self._troubles[what] += 1
                times = self._troubles[what]
                if (again := occurrence(times)) is not None:
                    log.warning("%s%s", problem, again, exc_info=times == 1 and not isinstance(error, ValueError))
            self._problems[what] = problem
        else:
            self._problems.pop(what, None)
            return answer
        return None


def _ends(parts: Iterator[Any]) -> bool:
    """Run the next part of a reset. Return whether it was the last."""
    return next(parts, _END) is _END
