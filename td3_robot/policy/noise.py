"""Exploration noises. Each noise is a pure function of (seed, source, incarnation, robot, episode, step).

The numbers do not depend on the order or the grouping of requests, so a recorded action can be computed again. The
generator is Philox (Salmon et al. 2011), which is counter-based: the key identifies the robot, the counter identifies
the kind of noise and the time.

To add a noise, write a subclass of :class:`Noise`, and add its row to :data:`td3_robot.noises.NOISES`. An installed
package adds the row with an entry point in the group ``td3_robot.noises``::

    class Laplace(Noise):
        NUMBER = 1000

        def block(self, generator):
            return generator.laplace(scale=0.5**0.5, size=self.shape)  # standard deviation 1
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from td3_robot.errors import USER_CODE, ConfigError
from td3_robot.messages import NO_NOISE
from td3_robot.noises import FIRST_INSTALLED, LAST_INSTALLED, NOISES, Parameter
from td3_robot.specs import Float32, UInt32, UInt64
from td3_robot.util.arrays import finite
from td3_robot.util.text import exception_line

if TYPE_CHECKING:
    from td3_robot.bundle import Exploration
    from td3_robot.messages import Step
    from td3_robot.policy.actor import Actor

log = logging.getLogger(__name__)

BLOCK = 64
"""Steps in a block. Drawing a block of one robot takes 20 µs; looking up a drawn step takes almost no time."""
_FLOAT32 = np.dtype(np.float32)
_NOTHING_DRAWN = np.iinfo(np.uint64).max  # an episode that no robot reaches


class Noise:
    """One kind of noise for the robots of one source.

    A subclass draws independent numbers of one robot in :meth:`block`, or of several robots in :meth:`blocks`. It
    overrides :meth:`draw` if a number depends on earlier numbers, and :meth:`act` if the noise is not added to the
    actor's output.

    Args:
        seed: the run's seed, 0 to 2^64 - 1.
        source, incarnation: as in the Step messages.
        robots: N, the number of robots of the source.
        actions: A, the number of action channels.
        parameters: a value for each of PARAMETERS.

    Attributes:
        NUMBER: identifies the noise, as ``noise_kind`` of messages and as an input of the generator. A noise of an
            installed package chooses a number from 1000 to 2^32 - 1. Lower numbers belong to this package.
        PARAMETERS: the parameters that a configuration can set, by name.
        shape: (steps, A), the shape of one robot's block.
    """

    NUMBER: ClassVar[int]
    PARAMETERS: ClassVar[Mapping[str, Parameter]] = {}

    def __init_subclass__(cls) -> None:
        number: Any = getattr(cls, "NUMBER", "missing")
        allowed = isinstance(number, int) and FIRST_INSTALLED <= number <= LAST_INSTALLED
        if not (allowed or cls.__module__.startswith("td3_robot.")):
            raise ConfigError(f"{cls.__qualname__}.NUMBER is {number}; allowed: {FIRST_INSTALLED} to {LAST_INSTALLED}")

    def __init__(
        self, seed: int, source: str, incarnation: int, robots: int, actions: int, **parameters: float
    ) -> None:
        self.parameters = parameters
        steps = self.steps_of_block(robots)
        self.shape = steps, actions
        # Number of a step's block: step >> _which. Place of the step in the block: step & _where.
        self._which, self._where = np.uint32(steps.bit_length() - 1), np.uint32(steps - 1)
        entropy = [seed, zlib.crc32(source.encode()), incarnation]
        keys: UInt64 = np.random.SeedSequence(entropy).generate_state(2 * robots, np.uint64).astype(np.uint64)
        self._keys = keys.reshape(robots, 2)
        self._starts = np.arange(robots) * steps
        # The newest block of each robot: its episode, its number in the episode, its values.
        self._episode = np.full(robots, _NOTHING_DRAWN, np.uint64)
        self._number = np.zeros(robots, np.uint32)
        self._values = np.zeros((robots, *self.shape), np.float32)
        self._rows = self._values.reshape(-1, actions)
        self._drawn = b""  # the episodes and block numbers of the newest call, as bytes

    @staticmethod
    def steps_of_block(robots: int) -> int:
        """The number of steps in a block, a power of two."""
        del robots
        return BLOCK

    def __call__(self, episode: UInt64, step: UInt32) -> Float32:
        """The numbers for the next action of each robot, float32[N, A], a new array.

        Args:
            episode: uint64[N], the field ``episode`` of the Step to answer.
            step: uint32[N], the field ``episode_step`` of this Step.
        """
        number = step >> self._which
        wanted = episode.tobytes() + number.tobytes()
        if wanted != self._drawn:  # almost always equal; comparing bytes is the fastest check
            robots = np.flatnonzero((self._episode != episode) | (self._number != number))
            if len(robots):  # there may be none if a peer sends the episode _NOTHING_DRAWN
                drawn = self.draw(robots, episode, number)
                check_drawn(drawn, (len(robots), *self.shape), "draw() or blocks()")
                self._values[robots] = drawn
                self._episode[robots], self._number[robots] = episode[robots], number[robots]
            self._drawn = wanted
        # Taking rows from one table needs half the time of indexing with two arrays.
        return self._rows.take(self._starts + (step & self._where), axis=0)

    def act(self, actor: Actor, observation: Float32, episode: UInt64, step: UInt32, scale: Float32) -> Float32:
        """The robots' actions with this noise, float32[N, A], within the limits of the actions; a new array.

        Args:
            observation: float32[N, O], with O observation channels.
            episode, step: as for :meth:`__call__`.
            scale: float32[N, A], the standard deviation that the policy asks for, in the unit of the channel.
        """
        action = actor.unclipped(observation)
        drawn = self(episode, step)
        drawn *= scale
        action += drawn
        return actor.clip(action)

    def draw(self, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        """A block for each of R robots, float32[R, steps, A].

        Args:
            robots: indices of the R robots.
            episode: uint64[N], the episode of every robot of the source.
            number: uint32[N], for every robot of the source: the number of the block in the robot's episode.
        """
        return self.blocks(robots, episode, number)

    def blocks(self, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        """A block of independent numbers for each of R robots. Arguments and result are those of :meth:`draw`."""
        drawn = []
        for i in robots:
            # The lowest counter word counts the draws of a block. The other words are NUMBER, block and episode.
            counter = np.array([0, self.NUMBER, number[i], episode[i]], np.uint64)
            block = self.block(np.random.Generator(np.random.Philox(key=self._keys[i], counter=counter)))
            check_drawn(block, self.shape, "block()")
            drawn.append(block)
        return np.stack(drawn)

    def block(self, generator: np.random.Generator) -> Float32:
        """Draw independent numbers, as a finite array of ``shape``.

        For :meth:`Noise.act`, their mean must be 0 and their standard deviation 1.
        """
        raise NotImplementedError


class NoNoise(Noise):
    """No noise: the actor's output is the action."""

    NUMBER = NO_NOISE

    def __init__(self, *identity: object, **parameters: float) -> None:  # this noise draws no numbers
        del identity, parameters

    def act(self, actor: Actor, observation: Float32, episode: UInt64, step: UInt32, scale: Float32) -> Float32:
        del episode, step, scale
        return actor(observation)


class Gaussian(Noise):
    """N(0, scale) in each dimension of the action."""

    NUMBER = 1

    def block(self, generator: np.random.Generator) -> Float32:
        return generator.standard_normal(self.shape, np.float32)


class Uniform(Noise):
    """U[low, high] in place of the actor's output. The scale has no effect.

    The warm-up uses this noise, or UniformV2 if the configured noise is in :mod:`td3_robot.policy.noise_v2`.
    """

    NUMBER = 2

    def block(self, generator: np.random.Generator) -> Float32:
        return generator.random(self.shape, np.float32)

    def act(self, actor: Actor, observation: Float32, episode: UInt64, step: UInt32, scale: Float32) -> Float32:
        del observation, scale
        return actor.clip(actor.low + self(episode, step) * (actor.high - actor.low))


class Categorical(Noise):
    """Draws an action from the softmax of score / scale. The actor gives one score for each discrete action.

    The Gumbel-max trick: with independent Gumbel numbers g, the draw is argmax(score + scale · g). The drawn action
    gets the highest allowed score, and the other actions get the lowest. The environment executes the action with the
    highest score, so it executes the drawn action.
    """

    NUMBER = 4

    def block(self, generator: np.random.Generator) -> Float32:
        return gumbel(generator.random(self.shape, np.float32))

    def act(self, actor: Actor, observation: Float32, episode: UInt64, step: UInt32, scale: Float32) -> Float32:
        score = actor(observation) + self(episode, step) * scale
        chosen = score.argmax(axis=1)[:, None] == np.arange(score.shape[1])
        return np.where(chosen, actor.high, actor.low)


class OrnsteinUhlenbeck(Gaussian):
    """x(t) = (1 - theta) x(t - 1) + N(0, scale); each reset sets x to 0 (Lillicrap et al. 2016)."""

    NUMBER = 3
    PARAMETERS: ClassVar[Mapping[str, Parameter]] = {"theta": Parameter(0.15, 0.01, 1.0)}

    def draw(self, robots: NDArray[np.intp], episode: UInt64, number: UInt32) -> Float32:
        keep = 1.0 - self.parameters["theta"]
        lead = blocks_remembered(self.parameters["theta"])
        blocks = np.zeros((len(robots), lead + 1, *self.shape), np.float32)  # numbers before the episode are 0
        for back in range(lead + 1):
            rows = np.flatnonzero(number[robots] >= back)
            if len(rows):
                blocks[rows, lead - back] = self.blocks(robots[rows], episode, number - np.uint32(back))
        normal = blocks.reshape(len(robots), -1, self.shape[1])
        x = np.zeros((len(robots), self.shape[1]))
        values = np.empty((len(robots), *self.shape), np.float32)
        for t in range(normal.shape[1]):
            x = keep * x + normal[:, t]  # in float64: one product and one sum give the same bits on every machine
            if t >= lead * BLOCK:
                values[:, t - lead * BLOCK] = x
        return values


def check_drawn(drawn: Any, shape: tuple[int, ...], method: str) -> None:
    """Check the numbers that a method of a noise returned.

    Raises:
        ConfigError: their shape is not ``shape``, or a number is not finite in float32.
    """
    values = np.asarray(drawn, np.float32)
    if values.shape != shape:
        raise ConfigError(f"{method} returned {_described(drawn)}; it must return an array of shape {shape}")
    if not finite(values):
        raise ConfigError(f"{method} returned numbers that are not finite in float32; all numbers must be finite")


def rehearse(kind: str, parameters: Mapping[str, float], robots: int, actions: int) -> None:
    """Make a noise and draw its first numbers, to find its mistakes before a training.

    If the noise overrides :meth:`Noise.act`, it may draw no numbers. Then this function only makes the noise.

    Raises:
        ConfigError: the noise has a mistake.
    """
    try:
        noise: Noise = NOISES.load(kind)(0, "", 0, robots, actions, **parameters)
        if type(noise).act is Noise.act:
            noise(np.zeros(robots, np.uint64), np.zeros(robots, np.uint32))
    except USER_CODE as error:  # the user's code may raise anything
        raise ConfigError(_explained(kind, error)) from error


def _explained(kind: str, error: BaseException) -> str:
    """Describe an error of a noise in one line."""
    text = str(error) if isinstance(error, ConfigError) else exception_line(error)
    return f"exploration noise {kind!r}: {text}"


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def gumbel(uniform: Float32) -> Float32:
    """Convert uniform numbers to Gumbel numbers. The uniform numbers are multiples of 2^-24 in [0, 1)."""
    numbers: Float32 = (-np.log(-np.log(uniform.astype(np.float64) + 2.0**-25))).astype(np.float32)
    return numbers


def blocks_remembered(theta: float) -> int:
    """For OrnsteinUhlenbeck: the number of blocks after which a drawn number has a weight of at most 2^-24 in x(t)."""
    return next(blocks for blocks in itertools.count() if (1.0 - theta) ** (BLOCK * blocks) <= 2.0**-24)


def robot_scales(scale: float | tuple[float, float], source: str, robots: int) -> Float32:
    """The scale of each robot's noise, float32[N, 1], as a fraction of half the range of an action.

    Args:
        scale: one scale for all robots, or a range [low, high]. A range has N equal parts, and the scale of robot i is
            in part i.
        source: sets the place of a scale within its part, so that robots of different sources have different scales.
        robots: N, the number of robots of the source.
    """
    low, high = scale if isinstance(scale, tuple) else (scale, scale)
    parts = (np.arange(robots) + zlib.crc32(source.encode()) / 2**32) / robots
    scales: Float32 = (low + (high - low) * parts).astype(np.float32)[:, None]
    return scales


class Explorer:
    """Computes the actions for one source, with the exploration that the current policy asks for.

    Args:
        step: any Step of the source. All Steps of the source must have the same N, A and incarnation.

    Attributes:
        number: ``noise_kind`` of the newest actions.
        problem: the mistake of the noise, in one line; empty if no mistake was found.
    """

    def __init__(self, seed: int, step: Step) -> None:
        self.incarnation = step.incarnation
        self.number = NO_NOISE
        self.problem = self._blamed = ""
        self._identity = (seed, step.source, step.incarnation, *step.action.shape)
        self._source = step.source
        self._noise: Noise = NoNoise()
        self._scale: Float32 = np.zeros(step.action.shape, np.float32)
        self._actor: Actor | None = None
        self._exploration: Exploration | None = None

    def act(self, actor: Actor, exploration: Exploration, step: Step) -> Float32:
        """The actions that answer a Step, float32[N, A], within the limits of the actions.

        If the noise has a mistake, all actions are NaN, and :attr:`problem` says why.
        """
        try:
            if actor is not self._actor or exploration is not self._exploration:
                self._adopt(actor, exploration)
            action = self._noise.act(actor, step.observation, step.episode, step.episode_step, self._scale)
            if action.__class__ is np.ndarray and action.dtype == _FLOAT32 and action.shape == self._scale.shape:
                return action
            wrong = _described(action)
            raise ConfigError(f"act() returned {wrong}; it must return float32 of shape {self._scale.shape}")
        except USER_CODE as error:  # the noise may be the user's code, which may raise anything
            if not self.problem or self._blamed != exploration.kind:
                self.problem, self._blamed = _explained(exploration.kind, error), exploration.kind
                log.error("%s", self.problem, exc_info=None if isinstance(error, ConfigError) else error)
        return np.full_like(self._scale, np.nan)

    def blame(self, observation: Float32) -> None:
        """Set :attr:`problem`, because the newest actions are not finite. The actor may be the cause, or the noise.

        Args:
            observation: float32[N, O], the observation that the actions answer.
        """
        if not self.problem and self._actor and self._exploration and finite(self._actor(observation)):
            what = "act() returned actions that are not finite; all actions must be finite"
            self.problem = f"exploration noise {self._exploration.kind!r}: {what}"
            self._blamed = self._exploration.kind

    def _adopt(self, actor: Actor, exploration: Exploration) -> None:
        known = self._exploration
        if known is None or (known.kind, known.parameters) != (exploration.kind, exploration.parameters):
            self._noise = NOISES.load(exploration.kind)(*self._identity, **exploration.parameters)
            self.number, self.problem = self._noise.NUMBER, ""
        self._scale = robot_scales(exploration.scale, self._source, len(self._scale)) * actor.half
        self._actor, self._exploration = actor, exploration
