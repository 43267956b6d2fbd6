"""A simulated robot with a ROS 2 interface. It obeys the topic ``commands``.

    python robot_node.py [--shuffle] [--still] [--ros-args …]

The robot publishes ``joint_states``, ``imu`` and ``feet`` at 100 Hz. The joint ``hip`` is a double integrator: the
command is its acceleration. ``--still`` keeps the hip at its start position. ``--shuffle`` changes the order of the
joints from message to message. Every 50 periods, the robot prints the number of periods, the number of commands and the
position of the hip.
"""

from __future__ import annotations

import sys
from itertools import cycle, permutations

import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Imu, JointState
from std_msgs.msg import Float64MultiArray

PERIOD = 0.01  # seconds
START = {"hip": 0.5, "knee": 0.25, "ankle": 0.125}  # rad


class Robot:
    def __init__(self, *, shuffle: bool, still: bool) -> None:
        self.node = rclpy.create_node("robot")
        best_effort = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        self._joints = self.node.create_publisher(JointState, "joint_states", best_effort)
        self._imu = self.node.create_publisher(Imu, "imu", best_effort)
        self._feet = self.node.create_publisher(Float64MultiArray, "feet", best_effort)
        self.node.create_subscription(Float64MultiArray, "commands", self._obey, 1)
        self.node.create_timer(PERIOD, self._step)
        self._still = still
        self._orders = cycle(permutations(START) if shuffle else [tuple(START)])
        self._position, self._velocity, self._command = START["hip"], 0.0, 0.0
        self._periods = self._commands = 0

    def _obey(self, message: Float64MultiArray) -> None:
        self._command = message.data[0]
        self._commands += 1

    def _step(self) -> None:
        if not self._still:
            self._velocity += PERIOD * self._command
            self._position += PERIOD * self._velocity
        joints = {**{name: (place, 0.0) for name, place in START.items()}, "hip": (self._position, self._velocity)}
        names = list(next(self._orders))
        position, velocity = ([joints[name][part] for name in names] for part in (0, 1))
        self._joints.publish(JointState(name=names, position=position, velocity=velocity))
        imu = Imu()
        imu.angular_velocity.y = 0.75
        self._imu.publish(imu)
        self._feet.publish(Float64MultiArray(data=[9.0, 0.375]))
        self._periods += 1
        if self._periods % 50 == 0:
            print(f"periods {self._periods} commands {self._commands} hip {self._position:.6f}", flush=True)


if __name__ == "__main__":
    rclpy.init(args=sys.argv)
    robot = Robot(shuffle="--shuffle" in sys.argv, still="--still" in sys.argv)
    rclpy.spin(robot.node)
