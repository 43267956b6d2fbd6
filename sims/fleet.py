"""N robots stepped together, with the phase of each: what one Step of a simulator process is made of."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from sims.environment import Environment, Outcome
from td3_robot.messages import Phase, UInt8, UInt32, UInt64
from td3_robot.specs import Float32, RobotSpec


class Fleet:
    """Independent robots of one task. A robot whose episode has ended is reset by the next step instead of stepped.

    Args:
        make: builds one environment from a seed.
        robots: N.
        seed, source, incarnation: what the random streams follow from; robots, sources and restarts all differ.

    Attributes:
        phase: uint8[N]; episode: uint64[N]; episode_step: uint32[N]; observation: float32[N, O];
        not_finite: episodes cut off because observation or reward was not finite.
        reward: float32[N], 0 where FIRST; action: float32[N, A], as applied, 0 where FIRST.
        world: of the robots at FIRST whose world was drawn: their index, as text, to what was drawn.
    """

    def __init__(self, make: Callable[[int], Environment], robots: int, seed: int, source: str, incarnation: int):
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
        self._begun = False

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
        stepped = 0
        self.world = {}
        for robot, environment in enumerate(self._environments):
            if self.phase[robot] >= Phase.TERMINATED:
                self.observation[robot] = environment.reset()
                self.phase[robot] = Phase.FIRST
                self.episode[robot] += self._begun
                self.episode_step[robot] = 0
                self.reward[robot] = 0
                self.action[robot] = 0
                if environment.world:
                    self.world[str(robot)] = dict(environment.world)
                continue
            outcome = self._sound(robot, environment.step(action[robot]))
            ended = Phase.TERMINATED if outcome.terminated else Phase.TRUNCATED if outcome.truncated else Phase.MID
            self.observation[robot], self.reward[robot], self.phase[robot] = outcome.observation, outcome.reward, ended
            self.episode_step[robot] += 1
            self.action[robot] = action[robot]
            stepped += 1
        self._begun = True
        return stepped

    def _sound(self, robot: int, outcome: Outcome) -> Outcome:
        """The outcome, unless physics came apart: then the episode is cut off where it last made sense.

        Numbers that are not finite would be refused by every receiver, and the robot would wait for ever.
        """
        if np.isfinite(outcome.reward) and np.isfinite(outcome.observation).all():
            return outcome
        self.not_finite += 1
        return Outcome(self.observation[robot].copy(), 0.0, terminated=False, truncated=True)

    def close(self) -> None:
        for environment in self._environments:
            environment.close()
