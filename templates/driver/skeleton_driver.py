"""The driver of the robot "skeleton". It works unchanged, with an imaginary robot.

For your own robot, replace the parts marked REPLACE. To run:

python skeleton_driver.py --config robot.yaml
"""

from __future__ import annotations

import sys

import numpy as np

from td3_robot.driver.node import main
from td3_robot.driver.robot import Robot
from td3_robot.specs import Channel, Float32, RobotSpec


class SkeletonDriver(Robot):
    """A joint that moves with the commanded velocity."""

    # REPLACE: the robot's name and control period in seconds; for each channel: name, unit, lowest and highest value.
    # The robot's policy must have the same specification, so train the policy on a task with the same values.
    spec = RobotSpec(
        "Skeleton",
        observations=(Channel("joint.angle", "rad", -3.0, 3.0),),
        actions=(Channel("joint.velocity", "rad/s", -1.0, 1.0),),
        control_period=0.05,
    )

    def __init__(self) -> None:
        # REPLACE: open the hardware here. Give every call to the hardware a short timeout.
        self._angle = 1.0
        self._velocity = 0.0

    def observe(self) -> Float32:
        """Return one number for each observation channel. The driver calls this once in each control period."""
        # REPLACE: read the sensors. Return NaN for a sensor that fails, or raise an exception.
        self._angle = float(np.clip(self._angle + self._velocity * self.spec.control_period, -3.0, 3.0))
        return np.array([self._angle], np.float32)

    def apply(self, action: Float32) -> None:
        """Command the motors. ``action`` has one number for each action channel, within the limits."""
        # REPLACE: send the action to the motors. The motors must keep this command until the next call.
        self._velocity = float(action[0])

    def close(self) -> None:
        """Release the hardware. The driver has applied the safe action before this call."""

    # Optional methods: `reset` prepares an episode, `phase` tells whether the episode ends, `reward` computes the
    # reward for a learner, and `stop` brings the robot to rest while another method hangs. See
    # docs/how-to/write_a_driver.md of td3-robot.


if __name__ == "__main__":
    sys.exit(main(SkeletonDriver(), "skeleton"))
