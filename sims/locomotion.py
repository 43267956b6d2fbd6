"""Walking robots as environments: what they observe, what they are paid for, when they have fallen.

All of it is that of ``pybullet_envs_gymnasium`` 0.6.0, number for number, and so are its peculiarities:

* Foot contacts are one step old: an observation holds those found after the step before it. After a reset they are 0.
* A torque is limited to its joint's largest, but the cost of it is that of the action as given.
* The mean position of the robot's parts counts the floor as one more part at the origin.
* The Humanoid's height is relative to 0.8 m, that of the others to their height at reset.
* HalfCheetah never terminates; a step that should have ended it costs 2 instead.

One was mended: in the package, the first episode of an environment measures its first observation without that floor,
and so pays its first step about ±0.05 too much. Here the first episode is like all others, which equals the package from
its second reset on. For the first it differs in the reward of the first step and, by less than 1e-5, in the first
observation's direction to the target; the reset noise is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from sims.environment import Episode, Outcome, check_state, leads_elsewhere, pack_random, unpack_random
from sims.physics import World
from sims.robots import CONTROL_PERIOD, TIME_LIMIT, RobotModel
from td3_robot.specs import Channel, Float32, RobotSpec

TARGET_X = 1000.0  # m; robots run towards this point on the x axis
RESET_NOISE = 0.1  # rad; joints start within this of the model's pose
OBSERVATION_LIMIT = 5.0
NEAR_LIMIT = 0.99  # of a joint's range, where it starts to cost
NEAR_LIMIT_COST = -0.1
TORSO_CHANNELS = 8


@cache
def specification(model: RobotModel) -> RobotSpec:
    """The robot's observation and action channels."""

    def channel(name: str, meaning: str, unit: str = "1", limit: float = OBSERVATION_LIMIT) -> Channel:
        return Channel(name, unit, -limit, limit, meaning)

    zero = "0.8 m" if model.start_height is not None else "its height at reset"
    observations = [
        channel("torso.height", f"height of the torso above {zero}", "m"),
        channel("target.sin", "sine of the direction to the target, seen from the torso", limit=1.0),
        channel("target.cos", "cosine of the direction to the target, seen from the torso", limit=1.0),
        channel("torso.velocity_x", "velocity of the torso ahead, times 0.3 s/m"),
        channel("torso.velocity_y", "velocity of the torso to its left, times 0.3 s/m"),
        channel("torso.velocity_z", "velocity of the torso upwards, times 0.3 s/m"),
        channel("torso.roll", "roll of the torso", "rad"),
        channel("torso.pitch", "pitch of the torso", "rad"),
    ]
    for joint, _ in model.joints:
        observations.append(channel(f"{joint}.position", "joint angle; -1 and 1 are its lower and upper limit"))
        observations.append(channel(f"{joint}.velocity", "joint velocity, times 0.1 s/rad"))
    observations += [
        Channel(f"{foot}.contact", "1", 0.0, 1.0, "1 if this part touched the floor one step earlier, else 0")
        for foot in model.feet
    ]
    actions = [
        Channel(f"{joint}.torque", "1", -1.0, 1.0, f"joint torque; 1 is {torque:g} N·m")
        for (joint, _), torque in zip(model.joints, model.torques, strict=True)
    ]
    return RobotSpec(model.name, tuple(observations), tuple(actions), CONTROL_PERIOD)


class Locomotion:
    """A walking robot; see :class:`sims.environment.Environment`.

    Args:
        seed: of the reset noise; None draws one from the operating system.
        show: open PyBullet's window and simulate in it.
    """

    time_limit = TIME_LIMIT

    def __init__(self, model: RobotModel, seed: int | None = None, show: bool = False) -> None:
        self.spec = specification(model)
        self._model = model
        self._random, _ = seeding.np_random(seed)
        self._world = World(model, show)
        self._episode = Episode(len(model.joints), TIME_LIMIT)
        self._gains = np.array(model.torques, np.float32 if model.single_precision_torque else np.float64)
        self._shape = (len(model.joints),)
        joints = TORSO_CHANNELS, TORSO_CHANNELS + 2 * len(model.joints)
        self._positions, self._speeds = slice(*joints, 2), slice(joints[0] + 1, joints[1], 2)
        self._one = np.ones(len(model.joints), np.float32)
        self._high = np.full(self.spec.observation_size, OBSERVATION_LIMIT, np.float32)
        self._low = -self._high
        self._turn = np.eye(3)  # rotation about the vertical, out of the world and into the torso's heading
        self._at_rest = [0.0] * len(model.feet)
        self._contacts = self._at_rest
        self._start_height: np.float64 | float | None = None
        self._distance = 0.0
        self._observation = np.zeros(self.spec.observation_size, np.float32)
        self._terms: dict[str, float] = {}

    def reset(self, seed: int | None = None) -> Float32:
        if seed is not None:
            self._random, _ = seeding.np_random(seed)
        self._episode.start(pack_random(self._random))
        noise = self._random.uniform(-RESET_NOISE, RESET_NOISE, self._shape)
        self._world.reset(noise.tolist())
        self._contacts = self._at_rest
        self._start_height = self._model.start_height
        self._terms = {}
        self._observation = self._clip(self._observe()[0])
        return self._observation.copy()

    def step(self, action: Float32) -> Outcome:
        episode, model = self._episode, self._model
        if not episode.running:
            raise RuntimeError(f"{model.name}: no episode is running; call reset() first")
        action = np.asarray(action, np.float32)
        if action.shape != self._shape:
            raise ValueError(f"{model.name}: the action has shape {action.shape}; it must be {self._shape}")
        current = float(np.add.reduce(np.square(action)))
        if not math.isfinite(current):
            raise ValueError(f"{model.name}: action {action.tolist()} is not finite, or its square is not")
        episode.add(action)
        one = self._one
        self._world.advance((self._gains * np.minimum(np.maximum(action, -one), one)).tolist())

        distance_before = self._distance
        raw, pitch = self._observe()
        observation = self._clip(raw)
        alive = model.alive(observation[0] + self._start_height, pitch, self._contacts)
        self._contacts = self._world.feet_on_floor()
        self._terms = {
            "alive": alive,
            "progress": (distance_before - self._distance) / CONTROL_PERIOD,
            "electricity": self._electricity(action, raw[self._speeds], current),
            "joints_at_limit": NEAR_LIMIT_COST * np.count_nonzero(np.abs(raw[self._positions]) > NEAR_LIMIT),
        }
        # Clipping removes infinities; what is left of failed physics is not-a-number.
        terminated = (alive < 0 and model.ends) or math.isnan(observation.dot(observation))
        truncated = episode.length >= TIME_LIMIT
        episode.running = not (terminated or truncated)
        self._observation = observation
        return Outcome(observation.copy(), sum(self._terms.values()), terminated, truncated)

    def _clip(self, raw: Float32) -> Float32:
        return np.minimum(np.maximum(raw, self._low), self._high)

    def _electricity(self, action: Float32, speeds: Float32, current: float) -> float:
        """Cost of mechanical power, mean |action · 0.1 joint speed|, and of current, mean action²."""
        power = float(np.add.reduce(np.abs(action * speeds)))
        return (self._model.torque_cost * power + self._model.current_cost * current) / len(action)

    def _observe(self) -> tuple[Float32, float]:
        """The observation before clipping, float32[O], and the torso's pitch in rad; measures the distance to go."""
        world = self._world
        x, y, z, roll, pitch, yaw, velocity = world.body()
        start_height = self._start_height
        if start_height is None:
            start_height = self._start_height = np.float64(z)
        ahead = TARGET_X - x
        self._distance = math.sqrt(ahead * ahead + y * y)
        # numpy's trigonometry may differ from the C library's in the last bit, and the published robots use numpy's.
        angles = np.array((np.arctan2(-y, ahead) - yaw, -yaw))
        (sin_target, sin), (cos_target, cos) = np.sin(angles).tolist(), np.cos(angles).tolist()
        turn = self._turn
        turn[0, 0] = turn[1, 1] = cos
        turn[0, 1], turn[1, 0] = -sin, sin
        vx, vy, vz = np.dot(turn, velocity).tolist()
        numbers = [float(z - start_height), sin_target, cos_target, 0.3 * vx, 0.3 * vy, 0.3 * vz, roll, pitch]
        for (position, speed, _, _), (low, width) in zip(world.joints(), world.joint_ranges, strict=True):
            numbers.append(2 * (position - low) / width - 1.0)
            numbers.append(0.1 * speed)
        numbers += self._contacts
        return np.array(numbers, np.float32), pitch

    def reward_terms(self) -> dict[str, float]:
        return dict(self._terms)

    def save_state(self) -> dict[str, Any]:
        episode = self._episode
        return {
            "random": episode.random.copy() if episode.started else pack_random(self._random),
            "started": episode.started,
            "actions": episode.actions(),
            "observation": self._observation.copy(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        saved = check_state(state, self.spec)
        unpack_random(saved.random, self._random)
        self._episode = Episode(len(self._gains), TIME_LIMIT)
        if not saved.started:
            return
        self.reset()
        for action in saved.actions:
            self.step(action)
        if not np.array_equal(self._observation, saved.observation, equal_nan=True):
            raise leads_elsewhere(self.spec, len(saved.actions))

    def render(self, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        return self._world.render(width, height)

    def close(self) -> None:
        self._episode.running = False
        self._world.close()
