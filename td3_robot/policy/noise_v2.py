"""Exploration noises that draw the numbers of all robots at once. They are the default.

The distributions are those of :mod:`td3_robot.policy.noise`; the numbers differ. A drawn number depends only on the
seed, the source, its incarnation, the robot, the kind of noise, the episode, the step, the channel and the number of
channels.

The generator is SplitMix64 (Steele, Lea and Flood 2014), with one stream for each robot, episode and kind of noise.
Appendix E of ``docs/reference/protocol.md`` has the whole definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.policy.noise import Categorical, Noise, OrnsteinUhlenbeck, Uniform, gumbel
from td3_robot.specs import Float32, UInt32, UInt64

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SPACING = np.float32(2.0**-24)  # between neighbouring uniform numbers
_TURN = np.float32(2 * np.pi)


def mixed(z: UInt64) -> UInt64:
    """Scramble the bits of each number in place, as SplitMix64 does. Return the same array."""
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z


class AtOnce(Noise):
    """Draws uniform numbers for all robots at once.

    With A action channels, a step needs P = ⌈A / 2⌉ words of 64 bits. Word p gives the numbers of the channels p and
    P + p. The object draws the numbers in blocks. A block holds the numbers of several steps. With many robots, the
    blocks are short, so that drawing a block delays an answer only a little. The numbers do not depend on the length
    of the blocks.
    """

    def __init__(self, *identity: Any, **parameters: Any) -> None:
        super().__init__(*identity, **parameters)
        words = self.shape[0] * -(-self.shape[1] // 2)  # in a block
        self._offsets = np.arange(1, words + 1, dtype=np.uint64) * _GAMMA
        self._block = self._offsets[-1:]
        self._first_keys = self._keys[:, 0] + np.array([self.NUMBER], np.uint64) * _SECOND

    @staticmethod
    def steps_of_block(robots: int) -> int:
        return max(16, min(256, 1 << max(1, 1024 // robots).bit_length() - 1))

    def uniforms(self, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        """Multiples of 2^-24 in [0, 1) for R robots, float32[2, R, steps, P]. Each word gives two of these numbers."""
        stream = mixed(self._first_keys[robots] + episode[robots] * _GAMMA) + self._keys[robots, 1]
        stream += number[robots] * self._block
        words = mixed(stream[:, None] + self._offsets)
        halves = words.astype("<u8", copy=False).view("<u4") >> np.uint32(8)  # the low half first
        numbers = halves.view(np.int32).astype(np.float32) * _SPACING  # converting signed integers is faster
        return np.ascontiguousarray(np.moveaxis(numbers.reshape(len(robots), self.shape[0], -1, 2), 3, 0))

    def joined(self, first: Float32, second: Float32) -> Float32:
        """Join the numbers of the channels 0 to P - 1 (``first``) with the numbers of the other channels (``second``).

        Both arrays are float32[R, steps, P]. The result is float32[R, steps, A].
        """
        return np.concatenate([first, second], axis=2)[:, :, : self.shape[1]]


class GaussianV2(AtOnce):
    """N(0, scale) in each dimension of the action, with the transform of Box and Muller (1958)."""

    NUMBER = 5

    def blocks(self, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        radius, angle = self.uniforms(robots, episode, number)
        radius += _SPACING  # in (0, 1], so that the logarithm is finite
        radius = np.sqrt(np.log(radius) * np.float32(-2))
        angle *= _TURN
        return self.joined(radius * np.cos(angle), radius * np.sin(angle))


class UniformV2(AtOnce, Uniform):
    """The distribution of :class:`Uniform`."""

    NUMBER = 6

    def blocks(self, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        return self.joined(*self.uniforms(robots, episode, number))


class OrnsteinUhlenbeckV2(GaussianV2, OrnsteinUhlenbeck):
    """The process of :class:`OrnsteinUhlenbeck`, driven by numbers like those of :class:`GaussianV2`."""

    NUMBER = 7
    steps_of_block = staticmethod(Noise.steps_of_block)  # OrnsteinUhlenbeck.draw needs blocks of this length


class CategoricalV2(AtOnce, Categorical):
    """The distribution of :class:`Categorical`."""

    NUMBER = 8

    def blocks(self, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        return gumbel(self.joined(*self.uniforms(robots, episode, number)))
