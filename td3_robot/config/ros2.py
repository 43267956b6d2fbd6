"""The section ``ros2``: where a ROS 2 driver reads observations, and where it sends actions."""

from __future__ import annotations

from typing import Literal

from td3_robot.config.section import Count, Finite, Natural, Positive, Section

ImuField = Literal[
    "orientation.x",
    "orientation.y",
    "orientation.z",
    "orientation.w",
    "angular_velocity.x",
    "angular_velocity.y",
    "angular_velocity.z",
    "linear_acceleration.x",
    "linear_acceleration.y",
    "linear_acceleration.z",
]


class QosConfig(Section, frozen=True):
    """Quality of service of topics.

    Attributes:
        reliability: ``reliable`` repeats lost messages; ``best_effort`` does not. A reliable reader gets nothing from a
            best-effort writer.
        depth: the largest number of messages in the queue.
    """

    reliability: Literal["reliable", "best_effort"] = "reliable"
    depth: Count = 1


class SensorQosConfig(QosConfig, frozen=True):  # QosConfig documents the keys
    reliability: Literal["reliable", "best_effort"] = "best_effort"


class ObservationConfig(Section, frozen=True):
    """The source of one observation channel: ``joint``, ``imu`` or ``index``. The channel's value is
    sign · scale · source value + offset.

    Attributes:
        channel: name of the observation channel.
        topic: the topic. The default is ``joint_states`` for a joint and ``imu`` for an IMU. If the channel is read
            with the key ``index``, there is no default, and the configuration must set the key ``topic``.
        joint: name of a joint in a sensor_msgs/JointState.
        field: which value of the joint the driver reads.
        imu: field of a sensor_msgs/Imu.
        index: index of a value in a std_msgs/Float64MultiArray.
        scale: factor from the unit of the message to the unit of the channel.
        sign: -1 if the positive direction of the joint is opposite to that of the channel.
        offset: number that is added last, in the unit of the channel.
    """

    channel: str
    topic: str = ""
    joint: str | None = None
    field: Literal["position", "velocity", "effort"] = "position"
    imu: ImuField | None = None
    index: Natural | None = None
    scale: Positive = 1.0
    sign: Literal[1, -1] = 1
    offset: Finite = 0.0

    def __post_init__(self) -> None:
        given = [key for key in ("joint", "imu", "index") if getattr(self, key) is not None]
        where = f"ros2.observations of {self.channel!r}"
        if len(given) != 1:
            raise ValueError(f"{where} sets {' and '.join(given) or 'no source'}; allowed: one of joint, imu and index")
        if given == ["index"] and not self.topic:
            raise ValueError(f"{where} sets index and no topic; set the topic of the array")

    @property
    def source(self) -> str:
        """The configured topic, or the default topic."""
        return self.topic or ("joint_states" if self.joint is not None else "imu")


class ActionConfig(Section, frozen=True):
    """One value of a command. The value is sign · scale · action + offset.

    Attributes:
        channel: name of the action channel.
        joint: name of the joint. Only a trajectory needs it.
        scale: factor from the unit of the channel to the unit of the command.
        sign: -1 if the positive direction of the joint is opposite to that of the channel.
        offset: number that is added last, in the unit of the command.
    """

    channel: str
    joint: str = ""
    scale: Positive = 1.0
    sign: Literal[1, -1] = 1
    offset: Finite = 0.0


class CommandConfig(Section, frozen=True):
    """The message that carries actions to the robot.

    Attributes:
        type: ``array`` is a std_msgs/Float64MultiArray, for a forward controller. ``trajectory`` is a
            trajectory_msgs/JointTrajectory with one point, for a joint trajectory controller.
        topic: topic of the commands.
        field: which field of a trajectory's point holds the values.
        reach_ms: time from the command until the robot reaches the trajectory's point. The default is one control
            period.
    """

    type: Literal["array", "trajectory"] = "array"
    topic: str = "commands"
    field: Literal["positions", "velocities", "effort"] = "positions"
    reach_ms: Positive | None = None


class Ros2Config(Section, frozen=True):
    """A robot with a ROS 2 interface, for ``td3-robot ros2 driver``.

    Attributes:
        bundle: a policy file, a run folder or a shipped policy. The driver takes the robot's specification from it.
        stale_ms: the longest allowed age of the value of each observation channel. If a value is older, the driver
            goes to FAULT and applies the safe action.
        observations: the source of each observation channel, in any order.
        actions: the values of a command, in the order of the array or of the trajectory's joints. By default, a
            command has a value for every action channel, in the order of the specification.
    """

    bundle: str | None = None
    stale_ms: Positive = 100.0
    observations: tuple[ObservationConfig, ...] = ()
    actions: tuple[ActionConfig, ...] = ()
    command: CommandConfig = CommandConfig()
    qos_in: SensorQosConfig = SensorQosConfig()
    qos_out: QosConfig = QosConfig()

    def __post_init__(self) -> None:
        for key in ("observations", "actions"):
            names = [item.channel for item in getattr(self, key)]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"ros2.{key} names the channel {twice!r} twice; allowed: each channel once")
        nameless = next((item.channel for item in self.actions if not item.joint), None)
        if self.command.type == "trajectory" and (nameless or not self.actions):
            raise ValueError(
                f"ros2.command.type is 'trajectory' and ros2.actions names no joint"
                f"{f' for {nameless!r}' if nameless else ''}; name the joint of each channel"
            )
