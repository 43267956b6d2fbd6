"""The ROS 2 nodes of a driver: lifecycle, services, topics and diagnostics. This module imports rclpy.

For each state of the driver, this table shows the state of the ROS node:

============= ============= ============================
driver        ROS           possible transitions in ROS
============= ============= ============================
unconfigured  unconfigured  ``configure``, ``shutdown``
inactive      inactive      ``activate``, ``shutdown``
active        active        ``deactivate``, ``shutdown``
fault         inactive      ``activate``, ``shutdown``
finalized     finalized     none
============= ============= ============================

A transition in ROS sends the command of the same name to the driver. If the driver refuses the command, the transition
fails, and the ROS node keeps its state. The ROS node refuses ``cleanup``, because a driver keeps its configuration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import Imu, JointState
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from td3_robot.config.ros2 import CommandConfig, Ros2Config
from td3_robot.messages import ActionOrigin
from td3_robot.ros2 import ros
from td3_robot.ros2.robot import Inputs, Kind
from td3_robot.safety.lifecycle import State

if TYPE_CHECKING:
    from td3_robot.ros2.driver import Desk

log = logging.getLogger(__name__)

PARAMETERS = (
    "endpoints.policy",
    "endpoints.learner",
    "endpoints.recorder",
    "endpoints.monitor",
    "endpoints.keys",
    "ros2.bundle",
)
"""Each of these ROS parameters replaces the configuration key of the same name."""
_MESSAGES: dict[Kind, Any] = {"joint": JointState, "imu": Imu, "array": Float64MultiArray}
_REPORT_PERIOD = 1.0  # seconds between two diagnostics
_SETTLE = 0.5  # seconds for the last command to arrive
_ROS_STATES = {
    State.UNCONFIGURED: "unconfigured",
    State.INACTIVE: "inactive",
    State.ACTIVE: "active",
    State.FAULT: "inactive",
    State.FINALIZED: "finalized",
}
_PATHS = {
    ("unconfigured", "inactive"): "configure",
    ("unconfigured", "active"): "configure",
    ("inactive", "active"): "activate",
    ("active", "inactive"): "deactivate",
    ("active", "unconfigured"): "deactivate",
    ("inactive", "unconfigured"): "cleanup",
}
"""For each (state of the ROS node, state to reach): the next transition. For all other pairs, ``shutdown`` is next."""


class DriverNode(LifecycleNode):  # type: ignore[misc]  # without rclpy, mypy sees the base class as Any
    """The lifecycle node of a driver. Its callbacks run only after :meth:`begin`."""

    _desk: Desk

    def __init__(self, name: str) -> None:
        super().__init__(name, automatically_declare_parameters_from_overrides=True)
        ros.refuse_simulated_time(self)
        given = ros.text_parameters(self, PARAMETERS)
        self.overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
        self._ros_state = "unconfigured"
        # True while the ROS node repeats a state change of the driver. Then transitions send no request to the driver.
        self._mirrors = False

    def begin(self, desk: Desk) -> None:
        """Offer the services, and publish the state of the driver."""
        self._desk = desk
        desk.notify = lambda: self.executor.create_task(self.mirror)
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._state_topic = self.create_publisher(DiagnosticStatus, "~/policy_state", latched)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self.create_service(Trigger, "~/estop", lambda _, answer: self._answer(answer, desk.stop()))
        self.create_service(Trigger, "~/reset", lambda _, answer: self._answer(answer, desk.request("reset")))
        self.create_timer(_REPORT_PERIOD, self._report)

    def commands(
        self, config: CommandConfig, qos: Any, joints: list[str], period: float
    ) -> Callable[[list[float]], None]:
        """Return a function that publishes the values of a command. ``period`` is the control period in seconds.

        A trajectory needs the names of the ``joints``.
        """
        kind = Float64MultiArray if config.type == "array" else JointTrajectory
        publisher = self._commands = self.create_publisher(kind, config.topic, qos)
        if config.type == "array":
            return lambda values: publisher.publish(Float64MultiArray(data=values))
        reach = period if config.reach_ms is None else config.reach_ms / 1e3
        time_from_start = Duration(seconds=reach).to_msg()

        def publish(values: list[float]) -> None:
            point = JointTrajectoryPoint(time_from_start=time_from_start, **{config.field: values})
            publisher.publish(JointTrajectory(joint_names=joints, points=[point]))

        return publish

    def settle(self) -> None:
        """Wait up to 0.5 s until the subscribers have the last command, which is the safe action."""
        self._commands.wait_for_all_acked(Duration(seconds=_SETTLE))

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def on_configure(self, _: Any) -> Any:
        return self._follow("configure", "inactive")

    def on_activate(self, _: Any) -> Any:
        return self._follow("activate", "active")

    def on_deactivate(self, _: Any) -> Any:
        return self._follow("deactivate", "inactive")

    def on_shutdown(self, _: Any) -> Any:
        return self._follow("shutdown", "finalized")

    def on_cleanup(self, _: Any) -> Any:
        return self._follow("cleanup", "unconfigured")

    def _follow(self, verb: str, target: str) -> Any:
        """Ask the driver for a transition, unless the ROS node only repeats a state change of the driver."""
        if not self._mirrors:
            refusal = "a driver keeps its configuration; allowed: shutdown"
            if error := refusal if verb == "cleanup" else self._desk.request(verb):
                log.warning("the ROS transition %s fails: %s", verb, error)
                return TransitionCallbackReturn.FAILURE
            self.executor.create_task(self.mirror)  # the driver may be in another state by now: mirror that state
        self._ros_state = target
        return TransitionCallbackReturn.SUCCESS

    def mirror(self) -> None:
        """Take the ROS node to the state of the driver, and publish the state."""
        wanted = _ROS_STATES[self._desk.condition.state]
        self._mirrors = True
        try:
            while self._ros_state not in (wanted, "finalized"):
                transition = _PATHS.get((self._ros_state, wanted), "shutdown")
                getattr(self, f"trigger_{transition}")()
        finally:
            self._mirrors = False
        self._state_topic.publish(self._policy_state())

    # -- reports -------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        name = self.get_fully_qualified_name()
        ages = {f"age of {topic} (s)": f"{age:.3f}" for topic, age in self._desk.robot.inputs.ages().items()}
        figures = {key: f"{value:g}" for key, value in self._desk.condition.figures.items()}
        state = self._policy_state()
        self._state_topic.publish(state)
        data = self._status(f"{name}: data", state.level, state.message, {**ages, **figures})
        message = DiagnosticArray(status=[state, data])
        message.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(message)

    def _policy_state(self) -> Any:
        now = self._desk.condition
        if not now.welcomed:
            level, text = DiagnosticStatus.STALE, "no policy server has welcomed the driver"
        elif now.origin == ActionOrigin.name_of(ActionOrigin.HELD):
            level = DiagnosticStatus.OK if now.moved else DiagnosticStatus.WARN
            text = "no Action came in time: the robot holds its last action"
        elif now.origin == ActionOrigin.name_of(ActionOrigin.OPERATOR):
            level, text = DiagnosticStatus.OK, "an operator moves the robot"
        elif now.moved:
            level, text = DiagnosticStatus.OK, f"a policy moves the robot: version {now.weights_version}"
        elif now.state is State.FAULT:
            level, text = DiagnosticStatus.ERROR, f"{now.state}: {now.reason}"
        else:
            level, text = DiagnosticStatus.WARN, f"no policy moves the robot: {now.state}: {now.reason}"
        values = {
            "state": now.state.value,
            "reason": now.reason,
            "welcomed": str(now.welcomed).lower(),
            "origin": now.origin,
            "weights_version": str(now.weights_version),
        }
        return self._status(f"{self.get_fully_qualified_name()}: policy", level, text, values)

    def _status(self, name: str, level: bytes, text: str, values: Mapping[str, str]) -> Any:
        pairs = [KeyValue(key=key, value=value) for key, value in values.items()]
        robot = self._desk.robot.spec.name
        return DiagnosticStatus(level=level, name=name, message=text, hardware_id=robot, values=pairs)

    @staticmethod
    def _answer(answer: Any, error: str) -> Any:
        answer.success, answer.message = not error, error or "done"
        return answer


def sensor_node(owner: DriverNode, inputs: Inputs, config: Ros2Config) -> Node:
    """Return a second node that receives the observations, even while a service of the first node waits for the policy
    server.

    ROS remaps the topic names of the first node. The second node uses the remapped names, so the remapping rules hold
    for both nodes.
    """
    node = Node(
        f"{owner.get_name()}_sensors",
        namespace=owner.get_namespace(),
        use_global_arguments=False,
        enable_rosout=False,
        start_parameter_services=False,
    )
    qos = ros.profile(config.qos_in)
    for topic, kind in inputs.topics.items():
        store = partial(inputs.store, topic)
        node.create_subscription(_MESSAGES[kind], owner.resolve_topic_name(topic), store, qos)
    return node
