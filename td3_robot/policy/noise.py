"""Exploration noise as a pure function of (seed, source, incarnation, robot, episode, step).

Nothing is drawn in sequence, so any order and any batching of requests gives the same noise, and a recorded action can
be computed again. The generator is Philox (Salmon et al. 2011), which is counter-based: key = who, counter = when.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from td3_robot.messages import NoiseKind, UInt32, UInt64
from td3_robot.specs import Float32

DEFAULT_THETA = 0.15  # of Lillicrap et al.
_BLOCK = 64  # steps drawn at once: a block costs 20 µs, a look-up of a drawn one almost nothing
_WHICH, _WHERE = np.uint32(_BLOCK.bit_length() - 1), np.uint32(_BLOCK - 1)  # step >> _WHICH, step & _WHERE


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
        self._starts = self._rows * _BLOCK
        self._shape = _BLOCK, actions
        self._drawn = {
            kind: _Block(
                np.full(robots, np.iinfo(np.uint64).max, np.uint64),
                np.zeros(robots, np.uint32),
                np.zeros((robots, _BLOCK, actions), np.float32),
            )
            for kind in (NoiseKind.GAUSSIAN, NoiseKind.UNIFORM, NoiseKind.ORNSTEIN_UHLENBECK)
        }
        self._theta = DEFAULT_THETA
        self._place = zlib.crc32(source.encode()) / 2**32

    def scales(self, scale: float | tuple[float, float]) -> Float32:
        """The standard deviation of each robot's noise, float32[N, 1], from one number or a range [low, high].

        The range is cut into N equal parts, one for each robot in order; where in its part a robot stands depends on
        the source, so that robots that are sources of their own differ too.
        """
        low, high = scale if isinstance(scale, tuple) else (scale, scale)
        parts = (self._rows + self._place) / len(self._rows)
        scales: Float32 = (low + (high - low) * parts).astype(np.float32)[:, None]
        return scales

    def __call__(self, kind: NoiseKind, episode: UInt64, step: UInt32, theta: float = DEFAULT_THETA) -> Float32:
        """Numbers for the action after each robot's given step: standard normal ones; uniform ones in [0, 1); or an
        Ornstein-Uhlenbeck process driven by standard normal ones.

        Args:
            kind: GAUSSIAN, UNIFORM or ORNSTEIN_UHLENBECK: independent streams.
            episode: uint64[N].
            step: uint32[N], episode_step of the Step to be answered.
            theta: θ of ORNSTEIN_UHLENBECK, above 0 to 1: 1 / θ steps are what it remembers.

        Returns:
            float32[N, A].
        """
        block = self._drawn[kind]
        if kind is NoiseKind.ORNSTEIN_UHLENBECK and theta != self._theta:
            self._theta = theta
            block.episode[:] = np.iinfo(np.uint64).max
            block.drawn = b""
        number = step >> _WHICH
        wanted = episode.tobytes() + number.tobytes()
        if wanted != block.drawn:  # as bytes: almost always they are the same, and this is how to see it fastest
            robots = np.flatnonzero((block.episode != episode) | (block.number != number))
            if len(robots):
                block.values[robots] = self._draw(kind, robots, episode, number)
                block.episode[robots], block.number[robots] = episode[robots], number[robots]
            block.drawn = wanted
        # One block after the other: to take rows is half the work of indexing with two arrays.
        rows = block.values.reshape(-1, self._shape[1])
        return rows.take(self._starts + (step & _WHERE), axis=0)

    def _draw(self, kind: NoiseKind, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        """float32[robots, _BLOCK, A]: a block for each of these robots."""
        if kind is not NoiseKind.ORNSTEIN_UHLENBECK:
            return np.stack([self._independent(kind, i, int(episode[i]), int(number[i])) for i in robots])
        keep = 1.0 - self._theta
        lead = blocks_remembered(self._theta)
        blocks = np.zeros((len(robots), lead + 1, *self._shape), np.float32)  # 0 before the episode
        for row, i in enumerate(robots):
            for back in range(min(lead, int(number[i])) + 1):
                blocks[row, lead - back] = self._independent(kind, i, int(episode[i]), int(number[i]) - back)
        normal = blocks.reshape(len(robots), -1, self._shape[1])
        x = np.zeros((len(robots), self._shape[1]))
        values = np.empty((len(robots), *self._shape), np.float32)
        for t in range(normal.shape[1]):
            x = keep * x + normal[:, t]  # in float64; one product and one sum, the same on every machine
            if t >= lead * _BLOCK:
                values[:, t - lead * _BLOCK] = x
        return values

    def _independent(self, kind: NoiseKind, robot: int, episode: int, number: int) -> Float32:
        """float32[_BLOCK, A]: a block of independent numbers."""
        # 2^64 draws of room in the lowest counter word keep blocks apart; kind, block and episode take the others.
        counter = np.array([0, int(kind), number, episode], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=self._keys[robot], counter=counter))
        if kind is NoiseKind.UNIFORM:
            return generator.random(self._shape, np.float32)
        return generator.standard_normal(self._shape, np.float32)


def blocks_remembered(theta: float) -> int:
    """After how many blocks the weight of a number in an Ornstein-Uhlenbeck process is at most 2^-24."""
    blocks = 0
    while (1.0 - theta) ** (_BLOCK * blocks) > 2.0**-24:
        blocks += 1
    return blocks


class _Block:
    """What is drawn so far: for each robot the episode and block number, and the values of its steps."""

    __slots__ = ("drawn", "episode", "number", "values")

    def __init__(self, episode: UInt64, number: UInt32, values: Float32) -> None:
        self.episode, self.number, self.values = episode, number, values
        self.drawn = b""  # episodes and numbers once more
