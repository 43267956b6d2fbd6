"""Exploration noise as a pure function of (seed, source, incarnation, robot, episode, step).

Nothing is drawn in sequence, so any order and any batching of requests gives the same noise, and a recorded action can
be computed again. The generator is Philox (Salmon et al. 2011), which is counter-based: key = who, counter = when.
"""

from __future__ import annotations

import zlib

import numpy as np

from td3_robot.messages import NoiseKind, UInt32, UInt64
from td3_robot.specs import Float32

_BLOCK = 64  # steps drawn at once: a block costs 20 µs, a look-up of a drawn one almost nothing
_LENGTH = np.uint32(_BLOCK)


class Noise:
    """The noise of one source's robots.

    Args:
        seed: of the run; 0 to 2^64 - 1.
        source, incarnation: as in the Step messages.
        robots, actions: N and A.
    """

    def __init__(self, seed: int, source: str, incarnation: int, robots: int, actions: int) -> None:
        entropy = [seed, zlib.crc32(source.encode()), incarnation]
        keys: UInt64 = np.random.SeedSequence(entropy).generate_state(2 * robots, np.uint64).astype(np.uint64)
        self._keys = keys.reshape(robots, 2)
        self._rows = np.arange(robots)
        self._drawn = {
            kind: _Block(
                np.full(robots, np.iinfo(np.uint64).max, np.uint64),
                np.zeros(robots, np.uint32),
                np.zeros((robots, _BLOCK, actions), np.float32),
            )
            for kind in (NoiseKind.GAUSSIAN, NoiseKind.UNIFORM)
        }

    def __call__(self, kind: NoiseKind, episode: UInt64, step: UInt32) -> Float32:
        """Standard normal numbers, or uniform ones in [0, 1), for the action after each robot's given step.

        Args:
            kind: GAUSSIAN or UNIFORM; the two are independent streams.
            episode: uint64[N].
            step: uint32[N], episode_step of the Step to be answered.

        Returns:
            float32[N, A].
        """
        block = self._drawn[kind]
        number = step // _LENGTH
        wanted = episode.tobytes() + number.tobytes()
        if (
            wanted != block.drawn
        ):  # compared as bytes: almost always they are the same, and this is how to see it fastest
            for robot in np.flatnonzero((block.episode != episode) | (block.number != number)):
                self._draw(block, kind, int(robot), int(episode[robot]), int(number[robot]))
            block.drawn = wanted
        values: Float32 = block.values[self._rows, step % _LENGTH]
        return values

    def _draw(self, block: _Block, kind: NoiseKind, robot: int, episode: int, number: int) -> None:
        # 2^64 draws of room in the lowest counter word keep blocks apart; kind, block and episode take the others.
        counter = np.array([0, int(kind), number, episode], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=self._keys[robot], counter=counter))
        shape = block.values.shape[1:]
        if kind is NoiseKind.GAUSSIAN:
            block.values[robot] = generator.standard_normal(shape, np.float32)
        else:
            block.values[robot] = generator.random(shape, np.float32)
        block.episode[robot], block.number[robot] = episode, number


class _Block:
    """What is drawn so far: for each robot the episode and block number, and the values of its steps."""

    __slots__ = ("drawn", "episode", "number", "values")

    def __init__(self, episode: UInt64, number: UInt32, values: Float32) -> None:
        self.episode, self.number, self.values = episode, number, values
        self.drawn = b""  # episodes and numbers once more
