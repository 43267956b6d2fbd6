"""Walking robots as environments: their observations, their reward, and when an episode ends.

Observations are equal, bit for bit, to those of ``pybullet_envs_gymnasium`` 0.6.0 with numpy 2. Rewards differ by less
than 1e-6, because of rounding. The robots keep these peculiarities of the package:

* Foot contacts are one step old. An observation holds the contacts after the previous step. They are 0 after a reset.
* Actions are clipped to ±1 before they become torques, but the cost uses the action before clipping.
* The mean position of the robot's parts includes the floor, as one more part at the origin.
* The Humanoid's observed height is relative to 0.8 m. The other robots' height is relative to their height at reset.
* A fall does not end an episode of HalfCheetah. Instead, each reward is lower by 2 while the robot is tilted by 1 rad
  or more, or has a shin or thigh on the floor.

This module does not repeat two flaws of the package:

* An environment's first observation in the package does not yet include the floor as a part. This changes the reward of
  the first step by up to about 0.3, and the first direction to the target by less than 1e-5. Here the first observation
  includes the floor, too.
* At a reset, the package keeps the contact points of the earlier episode. If a foot starts near such a point, the
  episode depends on the earlier one. Here a reset forgets them, so that a restored robot equals the saved one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from td3_robot.config.randomization import RandomizationConfig
from td3_robot.specs import Float32
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.backends.bullet.robots import (
    CONTROL_PERIOD,
    OBSERVATION_LIMIT,
    TIME_LIMIT,
    TORSO_CHANNELS,
    RobotModel,
    observation_groups,
    specification,
)
from td3_robot_sims.backends.bullet.world import World

TARGET_X = 1000.0  # m; robots run towards this point on the x axis
RESET_NOISE = 0.1  # rad; largest absolute position of a joint after a reset
# A joint whose relative position is beyond ±0.99 has a cost. The package rounds the position to float32 and compares it
# with float32(0.99). If a position is above the middle between float32(0.99) and the next float32, the rounded position
# is above float32(0.99). So this middle is the limit for positions in float64.
NEAR_LIMIT = float(np.float32(0.99)) + 2.0**-25  # near 0.99, neighbouring float32 numbers differ by 2**-24
NEAR_LIMIT_COST = -0.1


class Locomotion(Environment):
    """A walking robot. With ``show``, PyBullet's window shows the robot."""

    concurrent = True

    def __init__(
        self,
        model: RobotModel,
        seed: int | None = None,
        show: bool = False,
        randomization: RandomizationConfig | None = None,
    ) -> None:
        super().__init__(specification(model), TIME_LIMIT, seed, randomization, observation_groups(model))
        self._model = model
        self._world = World(model, show)
        joints = len(model.joints)
        self._gains = np.array(model.torques, np.float32 if model.single_precision else np.float64)
        self._speeds = slice(TORSO_CHANNELS + 1, TORSO_CHANNELS + 2 * joints, 2)
        self._one = np.ones(joints, np.float32)
        self._minus_one = -self._one
        self._high = np.full(self.spec.observation_size, OBSERVATION_LIMIT, np.float32)
        self._low = -self._high
        self._turn = np.eye(3)  # rotation about the vertical axis, from world coordinates to the torso's heading
        self._in_the_air = [0.0] * len(model.feet)
        self._contacts = self._in_the_air
        self._start_height: float | None = None
        self._joints_at_limit = 0
        self._potential = 0.0  # -(distance to the target in m) / (control period in s)

    def _reset(self) -> Float32:
        noise = self.random.uniform(-RESET_NOISE, RESET_NOISE, len(self._gains))
        drawn = self.world
        self._world.vary(drawn.get("mass"), drawn.get("friction"), drawn.get("joint_damping"))
        self._world.reset(noise.tolist(), drawn.get("tilt", 0.0), drawn.get("tilt_direction", 0.0))
        self._contacts = self._in_the_air
        self._start_height = self._model.start_height
        raw, _ = self._observe()
        return self._clip(raw)

    def _step(self, action: Float32) -> tuple[Float32, float, bool, bool]:
        model = self._model
        limited = np.minimum(np.maximum(action, self._minus_one), self._one)
        torques: list[float] = (self._gains * limited).tolist()
        if self.disturbance:
            strength = self.disturbance.world.get("motor_strength", 1.0)
            torques = [strength * torque for torque in torques]
            if push := self.disturbance.push():
                self._world.push(*push)
        self._world.advance(torques)
        potential_before = self._potential
        raw, pitch = self._observe()
        observation = self._clip(raw)
        zero = self._start_height
        assert zero is not None
        height = observation[0] + np.float32(zero) if model.single_precision else float(observation[0]) + zero
        alive = model.alive(height, pitch, self._contacts)
        self._contacts = self._world.feet_on_floor()
        terms = self._terms = {
            "alive": alive,
            "progress": self._potential - potential_before,
            "electricity": self._electricity(action, raw[self._speeds]),
            "joints_at_limit": NEAR_LIMIT_COST * self._joints_at_limit,
        }
        # Clipping removes infinities, so only NaN shows that the physics diverged.
        terminated = (alive < 0 and model.ends) or math.isnan(sum(observation.tolist()))
        return observation, sum(terms.values()), terminated, False

    def _clip(self, raw: Float32) -> Float32:
        return np.minimum(np.maximum(raw, self._low), self._high)

    def _electricity(self, action: Float32, speeds: Float32) -> float:
        """Return the weighted sum of the power (mean |action · 0.1 joint speed|) and the current (mean action²)."""
        # Means in float32, as in the package. np.mean gives the same result, but is slower.
        power = float(np.add.reduce(np.abs(action * speeds)) / len(action))
        current = float(np.add.reduce(np.square(action)) / len(action))
        return self._model.torque_cost * power + self._model.current_cost * current

    def _observe(self) -> tuple[Float32, float]:
        """Return the observation before clipping, float32[O], and the torso's pitch in rad.

        This also updates ``_potential`` and ``_joints_at_limit``. If ``_start_height`` is None, this sets it.
        """
        world = self._world
        x, y, z, roll, pitch, yaw, velocity = world.body()
        start_height = self._start_height
        if start_height is None:
            start_height = self._start_height = z
        ahead = TARGET_X - x
        self._potential = -math.sqrt(ahead * ahead + y * y) / CONTROL_PERIOD
        direction = math.atan2(-y, ahead) - yaw
        cos, sin = math.cos(-yaw), math.sin(-yaw)
        turn = self._turn
        turn[0, 0] = turn[1, 1] = cos
        turn[0, 1], turn[1, 0] = -sin, sin
        # Do not use dot(). It gives the same bits, but releases the interpreter lock. Then the thread of another
        # environment takes the lock. The thread of this environment waits for the lock much longer than the
        # multiplication takes.
        vx, vy, vz = (turn @ velocity).tolist()
        numbers = [
            z - start_height,
            math.sin(direction),
            math.cos(direction),
            0.3 * vx,
            0.3 * vy,
            0.3 * vz,
            roll,
            pitch,
        ]
        at_limit = 0
        for position, speed, (low, width) in zip(*world.joints(), world.joint_ranges):  # noqa: B905 - a hot loop
            relative = 2 * (position - low) / width - 1.0
            if abs(relative) > NEAR_LIMIT:
                at_limit += 1
            numbers += (relative, 0.1 * speed)
        self._joints_at_limit = at_limit
        numbers += self._contacts
        return np.array(numbers, np.float32), pitch

    def follow(self) -> None:
        """Keep the robot in the middle of the window. Call this only with ``show``."""
        self._world.follow()

    def render(self, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        return self._world.render(width, height)

    def close(self) -> None:
        super().close()
        self._world.close()
