"""N robots stepped together, with the phase of each: what one Step of a simulator process is made of.

Robots whose environments allow it are stepped in threads, as many as there are cores: what comes out is the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import BundleError
from td3_robot.messages import Phase, UInt8, UInt32, UInt64
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util.machine import available_cores
from td3_robot_sims.backends.base import Environment, Outcome
from td3_robot_sims.thread_pool import ThreadPool

_OVER = int(Phase.TERMINATED)  # numpy compares with a plain number four times as fast
_SAVED = ("phase", "episode", "episode_step", "observation", "reward", "action")


class VectorEnvironment:
    """Independent robots of one task. A robot whose episode has ended is reset by the next step instead of stepped.

    Args:
        make: builds one environment from a seed.
        robots: N.
        seed, source, incarnation: what the random streams follow from; robots, sources and restarts all differ.
        threads: that step robots at once; None: as many as there are cores. Never more than robots, and one where an
            environment is not ``concurrent``.

    Attributes:
        threads: that step robots at once.
        phase: uint8[N]; episode: uint64[N]; episode_step: uint32[N]; observation: float32[N, O];
        not_finite: episodes cut off because observation or reward was not finite.
        reward: float32[N], 0 where FIRST; action: float32[N, A], as applied, 0 where FIRST.
        world: of the robots at FIRST whose world was drawn: their index, as text, to what was drawn.
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
        self.spec: RobotSpec = self._environments[0].spec
        self.phase: UInt8 = np.full(robots, Phase.TRUNCATED, np.uint8)
        self.episode: UInt64 = np.zeros(robots, np.uint64)
        self.episode_step: UInt32 = np.zeros(robots, np.uint32)
        self.observation: Float32 = np.zeros((robots, self.spec.observation_size), np.float32)
        self.reward: Float32 = np.zeros(robots, np.float32)
        self.action: Float32 = np.zeros((robots, self.spec.action_size), np.float32)
        self.world: dict[str, dict[str, float]] = {}
        self.problem = self.stop = ""  # physics knows neither
        self.not_finite = 0
        self._begun = 0
        together = all(environment.concurrent for environment in self._environments)
        self.threads = min(robots, threads or available_cores()) if together else 1
        self._pool = ThreadPool(self.threads)

    def __len__(self) -> int:
        return len(self._environments)

    @property
    def commanded(self) -> Float32:
        """float32[N, A]: what was applied last."""
        return self.action

    def command(self, action: Float32) -> None:
        """Nothing: what is applied in a period is settled when the period is simulated."""

    def step(self, action: Float32) -> int:
        """Step every robot that is in an episode, reset every other.

        Args:
            action: float32[N, A]; rows of robots that are reset are ignored.

        Returns:
            How many robots were stepped: the transitions this makes.
        """
        ended: list[bool] = (self.phase >= _OVER).tolist()
        results: list[Any] = [None] * len(ended)

        def turn(robot: int) -> None:
            environment = self._environments[robot]
            results[robot] = environment.reset() if ended[robot] else environment.step(action[robot])

        self._pool.run(turn, len(ended))
        self.world = {}
        for robot, result in enumerate(results):
            if ended[robot]:
                self._begin(robot, result)
            else:
                self._go_on(robot, self._sound(robot, result))
                self.action[robot] = action[robot]
        self._begun = 1
        return ended.count(False)

    def _begin(self, robot: int, observation: Float32) -> None:
        self.observation[robot], self.reward[robot], self.action[robot] = observation, 0, 0
        self.phase[robot] = Phase.FIRST
        self.episode[robot] += self._begun
        self.episode_step[robot] = 0
        if world := self._environments[robot].world:
            self.world[str(robot)] = dict(world)

    def _go_on(self, robot: int, outcome: Outcome) -> None:
        self.observation[robot], self.reward[robot] = outcome.observation, outcome.reward
        self.phase[robot] = (
            Phase.TERMINATED if outcome.terminated else Phase.TRUNCATED if outcome.truncated else Phase.MID
        )
        self.episode_step[robot] += 1

    def _sound(self, robot: int, outcome: Outcome) -> Outcome:
        """The outcome, unless physics came apart: then the episode is cut off where it last made sense.

        Numbers that are not finite would be refused by every receiver, and the robot would wait for ever.
        """
        if math.isfinite(sum(outcome.observation.tolist(), outcome.reward)):
            return outcome
        self.not_finite += 1
        return Outcome(self.observation[robot].copy(), 0.0, terminated=False, truncated=True)

    def save_state(self) -> dict[str, NDArray[Any]]:
        """The complete state as named arrays; see :meth:`Environment.save_state`."""
        arrays = {name: getattr(self, name).copy() for name in _SAVED}
        for robot, environment in enumerate(self._environments):
            for name, value in environment.save_state().items():
                arrays[f"{robot}.{name}"] = np.asarray(value)
        return {**arrays, "begun": np.array([self._begun]), "not_finite": np.array([self.not_finite])}

    def restore_state(self, arrays: Mapping[str, NDArray[Any]]) -> list[str]:
        """Return to a saved state.

        A robot whose environment does not come out as it was saved begins a new episode with the next step instead.

        Returns:
            Why, for each robot that does; empty if the state is the same to the last bit.

        Raises:
            BundleError: the arrays are not those of vector environment like this one.
        """
        for name in _SAVED:
            own, saved = getattr(self, name), arrays.get(name)
            if saved is None or saved.shape != own.shape or saved.dtype != own.dtype:
                found = "missing" if saved is None else f"{saved.dtype}{list(saved.shape)}"
                raise BundleError(f"saved robots: {name} is {found}; this one needs {own.dtype}{list(own.shape)}")
        for name in _SAVED:
            getattr(self, name)[...] = arrays[name]
        self.world = {}
        self._begun, self.not_finite = (int(arrays[name][0]) for name in ("begun", "not_finite"))
        reasons: dict[int, str] = {}

        def turn(robot: int) -> None:
            prefix = f"{robot}."
            state: dict[str, Any] = {
                name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)
            }
            try:
                self._environments[robot].restore_state({**state, "started": bool(state.get("started", False))})
            except BundleError as error:
                reasons[robot] = f"robot {robot}: {error}"
                self.phase[robot] = Phase.TRUNCATED

        self._pool.run(turn, len(self))
        return [reasons[robot] for robot in sorted(reasons)]

    def close(self) -> None:
        self._pool.close()
        for environment in self._environments:
            environment.close()
