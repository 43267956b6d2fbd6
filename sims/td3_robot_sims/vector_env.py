"""A vector environment: it steps the N robots of a simulator process together."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.driver.body import Body
from td3_robot.errors import BundleError, NodeError
from td3_robot.messages import Phase
from td3_robot.specs import FLOAT32_MAX, Float32
from td3_robot.util.arrays import finite
from td3_robot.util.machine import available_cores
from td3_robot.util.text import occurrence
from td3_robot_sims.backends import saved_episode
from td3_robot_sims.backends.base import Environment, Outcome
from td3_robot_sims.finiteness import not_finite
from td3_robot_sims.thread_pool import ThreadPool

log = logging.getLogger(__name__)

_OVER = int(Phase.TERMINATED)  # a plain integer: comparing with a Phase takes four times as long
_SAVED = ("phase", "episode", "episode_step", "observation", "reward", "action")


class VectorEnvironment(Body):
    """Independent robots of one task. The step after the end of a robot's episode resets the robot.

    If the environments allow it, several threads step them. The number of threads does not change the results.

    Args:
        make: makes one environment from a seed.
        robots: the number N of robots.
        seed: with ``source`` and ``incarnation``, it determines every robot's random stream.
        threads: number of threads; None for one per processor core. At most N threads are used.

    Attributes:
        phase, episode, …: see :class:`td3_robot.driver.body.Body`.
        not_finite: number of episodes that were truncated because an observation or reward was not finite in float32.
    """

    def __init__(
        self,
        make: Callable[[int], Environment],
        robots: int,
        seed: int,
        source: str,
        incarnation: int,
        threads: int | None = None,
    ) -> None:
        sequence = np.random.SeedSequence([seed, zlib.crc32(source.encode()), incarnation])
        self._environments = [make(int(word)) for word in sequence.generate_state(robots, np.uint32)]
        super().__init__(self._environments[0].spec, robots)
        self.commanded = self.action  # both names mean the same array; each step changes it in place
        self.not_finite = 0
        self._begun = 0
        concurrent = all(environment.concurrent for environment in self._environments)
        self.threads = min(robots, threads or available_cores()) if concurrent else 1
        self._pool = ThreadPool(self.threads)

    def __len__(self) -> int:
        return len(self._environments)

    def step(self, action: Float32, may_reset: bool = True) -> int:
        """Apply ``action``, float32[N, A], to the robots whose episodes are running. Reset the other robots.

        Returns:
            The number of robots that were not reset. This is the number of transitions.

        Raises:
            NodeError: the first observation of an episode is not finite.
        """
        del may_reset  # a simulated robot may always be reset
        ended: list[bool] = (self.phase >= _OVER).tolist()
        results: list[Any] = [None] * len(ended)

        def step_or_reset(robot: int) -> None:
            environment = self._environments[robot]
            results[robot] = environment.reset() if ended[robot] else environment.step(action[robot])

        self._pool.run(step_or_reset, len(ended))
        self.world = {}
        for robot, result in enumerate(results):
            if ended[robot]:
                self._begin(robot, result)
            else:
                self._continue(robot, result, action[robot])
        self._begun = 1
        return ended.count(False)

    def _begin(self, robot: int, observation: Float32) -> None:
        if not finite(observation):
            # There is no earlier observation to send instead. Receivers refuse a Step with numbers that are not finite,
            # and the robot would then wait forever for an Action.
            environment = self._environments[robot]
            problem = not_finite(environment.spec, observation)
            raise NodeError(f"task {environment.task_name!r}: after a reset, {problem}; it must be finite")
        self.observation[robot], self.reward[robot], self.action[robot] = observation, 0, 0
        self.phase[robot] = Phase.FIRST
        self.episode[robot] += self._begun
        self.episode_step[robot] = 0
        if world := self._environments[robot].world:
            self.world[str(robot)] = dict(world)

    def _continue(self, robot: int, outcome: Outcome, action: Float32) -> None:
        observation, reward, terminated, truncated = outcome
        if not (finite(observation) and abs(reward) <= FLOAT32_MAX):
            # The physics diverged: keep the last observation, and truncate the episode. Receivers refuse a Step with
            # numbers that are not finite, and the robot would then wait forever for an Action.
            self._count_not_finite(robot, observation, reward)
            observation, reward, terminated, truncated = self.observation[robot], 0.0, False, True
        self.observation[robot], self.reward[robot], self.action[robot] = observation, reward, action
        self.phase[robot] = Phase.TERMINATED if terminated else Phase.TRUNCATED if truncated else Phase.MID
        self.episode_step[robot] += 1

    def _count_not_finite(self, robot: int, observation: Float32, reward: float) -> None:
        """Count a truncated episode, and log it unless the log has many of them."""
        self.not_finite += 1
        if (again := occurrence(self.not_finite)) is not None:
            environment = self._environments[robot]
            problem = not_finite(environment.spec, observation, reward)
            allowed = "it must be finite in float32, so the episode is truncated"
            log.warning("task %r: %s; %s%s", environment.task_name, problem, allowed, again)

    def save_state(self) -> dict[str, NDArray[Any]]:
        """The state as named arrays, see :meth:`Environment.save_state`. Names of robot 0's arrays begin with "0."."""
        arrays = {name: getattr(self, name).copy() for name in _SAVED}
        for robot, environment in enumerate(self._environments):
            for name, value in environment.save_state().items():
                arrays[f"{robot}.{name}"] = np.asarray(value)
        return {**arrays, "begun": np.array([self._begun]), "not_finite": np.array([self.not_finite])}

    def restore_state(self, arrays: Mapping[str, NDArray[Any]]) -> list[str]:
        """Return to a saved state.

        Returns:
            A reason for each robot that cannot be restored exactly. The next step begins a new episode of this robot.

        Raises:
            BundleError: an array with values of all robots is missing, or does not fit this task and number of robots.
        """
        own: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in _SAVED}
        for name, mine in own.items():
            saved_episode.array(arrays, name, mine.dtype, mine.shape, "saved robots")
        for name, mine in own.items():
            mine[...] = arrays[name]
        self.world = {}
        counts = (saved_episode.array(arrays, name, np.int64, (1,), "saved robots") for name in ("begun", "not_finite"))
        self._begun, self.not_finite = (int(count[0]) for count in counts)
        reasons: dict[int, str] = {}

        def restore(robot: int) -> None:
            prefix = f"{robot}."
            state = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            try:
                self._environments[robot].restore_state(state)
            except BundleError as error:
                reasons[robot] = f"robot {robot}: {error}"
                self.phase[robot] = Phase.TRUNCATED

        self._pool.run(restore, len(self))
        return [reasons[robot] for robot in sorted(reasons)]

    def close(self) -> None:
        """Free the worlds and end the threads."""
        self._pool.close()
        for environment in self._environments:
            environment.close()
