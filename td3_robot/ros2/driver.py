"""``td3-robot ros2 driver``: the driver of a robot with a ROS 2 interface, as a managed lifecycle node."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from td3_robot.driver.core import SourceCore
from td3_robot.driver.node import drive
from td3_robot.errors import ConfigError, Td3RobotError
from td3_robot.messages import ActionOrigin
from td3_robot.operators import connect, make_command
from td3_robot.policies import load_policy
from td3_robot.ros2 import ros
from td3_robot.ros2.robot import Inputs, Outputs, Ros2Robot
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Node
from td3_robot.runtime.process import run_node
from td3_robot.safety.lifecycle import State

if TYPE_CHECKING:
    from td3_robot.ros2.lifecycle import DriverNode

log = logging.getLogger(__name__)

_FIRST_DATA = 10.0  # seconds to wait until every channel has a value
_ANSWER = 2.0  # seconds to wait for the policy server's answer to a request
_STOPPED = 2.0  # seconds within which the driver has to stop the robot
_TURN = 0.5  # seconds to wait until the loop of the driver ends its turn
_FIGURES_PERIOD = 1.0  # seconds between two updates of ``Condition.figures``
_MOVED = (ActionOrigin.POLICY, ActionOrigin.OPERATOR)
_EPILOG = """examples:
  td3-robot ros2 driver --config robot.yaml
  td3-robot ros2 driver --config robot.yaml --ros-args -r __ns:=/left -r joint_states:=/left_arm/joint_states
  td3-robot ros2 driver --config robot.yaml --ros-args -p ros2.bundle:=policy.safetensors
  ros2 lifecycle set /td3_robot_driver activate
  ros2 service call /td3_robot_driver/estop std_srvs/srv/Trigger

The section ros2 of the configuration maps topics to channels; see docs/how-to/ros2.md."""


def main(arguments: Sequence[str]) -> int:
    """Drive a robot through ROS 2 until a signal or a shutdown. Return the exit code of the process."""
    ours, ros_words = ros.split(arguments)
    description = "Drive a robot that has a ROS 2 interface, as a lifecycle node."
    parser = node_parser("td3-robot ros2 driver", "robot", description, deployable=True, epilog=_EPILOG)
    options = parser.parse_args(ours)
    with ros.running(ros_words):
        from td3_robot.ros2.lifecycle import DriverNode

        ros_node = DriverNode("td3_robot_driver")
        options.overrides += ros_node.overrides
        return run_node("driver", options, lambda node: _drive(node, ros_node))


def _drive(node: Node, ros_node: DriverNode) -> None:
    from td3_robot.ros2.lifecycle import sensor_node

    config = node.config.ros2
    if config.bundle is None:
        raise ConfigError("ros2.bundle is not set; allowed: a policy file, a run folder or a shipped policy")
    spec = load_policy(config.bundle).spec
    inputs, outputs = Inputs(spec, config), Outputs(spec, config)
    for it in config.observations:
        ros.check_topic(ros_node, f"ros2.observations of {it.channel!r}: the topic", it.source)
    ros.check_topic(ros_node, "ros2.command.topic", config.command.topic)
    publish = ros_node.commands(config.command, ros.profile(config.qos_out), outputs.joints, spec.control_period)
    robot = Ros2Robot(spec, inputs, outputs, publish)
    desk = Desk(node, robot)
    ros_node.begin(desk)
    with ros.spinning(ros_node), ros.spinning(sensor_node(ros_node, inputs, config)):
        log.info("%s: waits for data on %s, for at most %g s", node.name, ", ".join(inputs.topics), _FIRST_DATA)
        inputs.wait(_FIRST_DATA, lambda: bool(node.stop_signal))
        try:
            drive(node, robot, desk.follow)
        finally:
            ros_node.settle()
            desk.end()


class Condition(NamedTuple):
    """What the driver reports about itself.

    Attributes:
        state: the driver's state.
        reason: the reason for the last change of the state.
        welcomed: whether the policy server has welcomed the driver.
        moved: whether a policy or an operator chose the newest applied action. While the robot holds an action, this
            value does not change.
        origin: where the newest applied action comes from, for example ``policy`` or ``safe``.
        weights_version: version of the policy that chose the applied action. The value is 0 if no policy chose the
            action, or if the robot holds an action.
        figures: more figures, for diagnostics.
    """

    state: State = State.UNCONFIGURED
    reason: str = "started"
    welcomed: bool = False
    moved: bool = False
    origin: str = ""
    weights_version: int = 0
    figures: Mapping[str, float] = {}


class Desk:
    """Carries out the requests of ROS, and follows the state of the driver.

    Like an operator, the desk sends the requests to the policy server. An emergency stop and a shutdown also work
    without a server.

    Attributes:
        condition: the newest condition of the driver.
        notify: called after a change of ``state``, ``reason``, ``welcomed`` or ``moved``.
    """

    def __init__(self, node: Node, robot: Ros2Robot) -> None:
        self.robot = robot
        self.condition = Condition()
        self.notify: Callable[[], None] = lambda: None
        self._node = node
        self._turned = threading.Condition()
        self._turns = 0
        self._next_figures = 0.0

    def follow(self, core: SourceCore) -> None:
        """Read the state of the driver. The driver's thread calls this after each turn."""
        lifecycle, step, now = core.guard.lifecycle, core.newest, time.monotonic()
        before = self.condition
        figures = before.figures
        if now >= self._next_figures:
            self._next_figures = now + _FIGURES_PERIOD
            figures = {**core.figures(), **core.counters, **core.guard.counters}
        safe = core.guard.safe
        origin = ActionOrigin.SAFE if safe else step.origin if step else ActionOrigin.NONE
        self.condition = before._replace(
            state=lifecycle.state,
            reason=lifecycle.reason,
            welcomed=core.contact.welcomed,
            moved=before.moved if origin == ActionOrigin.HELD else origin in _MOVED,
            origin=ActionOrigin.name_of(origin),
            weights_version=step.weights_version if step and not safe else 0,
            figures=figures,
        )
        with self._turned:
            self._turns += 1
            self._turned.notify_all()
        if self.condition[:4] != before[:4]:
            self.notify()

    def request(self, verb: str) -> str:
        """Carry out a request: configure, activate, deactivate, reset or shutdown.

        Return the error, or an empty text.
        """
        error = self._command(verb)
        if verb == "shutdown" and error:  # a driver must end even without a policy server
            log.warning("shutdown: %s; the driver ends itself", error)
            os.kill(os.getpid(), signal.SIGTERM)
            return ""
        if verb == "reset" and not error:
            self.robot.stopped_by = ""
        return error

    def stop(self) -> str:
        """Stop the robot in an emergency, also without a policy server. Return the error, or an empty text."""
        self.robot.stopped_by = "emergency stop by a ROS service; call the service reset to end it"
        with self._turned:
            rests = self._turned.wait_for(self._rests, _STOPPED)
        error = self._command("estop")
        if not rests and not self._rests():
            return f"the stop is NOT confirmed by the driver within {_STOPPED:g} s"
        if error:
            log.warning("the policy server does not know of the emergency stop: %s", error)
        return ""

    def end(self) -> None:
        """Report that the driver has ended."""
        self.condition = self.condition._replace(state=State.FINALIZED, reason="the driver has ended")
        self.notify()

    def _rests(self) -> bool:
        """Return True if no policy and no operator can move the robot."""
        return self.condition.state is not State.ACTIVE or not self.condition.welcomed

    def _command(self, verb: str) -> str:
        node = self._node
        try:
            operator = connect(node.endpoint("policy"), node.config.endpoints.keys, timeout=_ANSWER)
            operator.ask(make_command(verb, node.name, "asked for through ROS 2"))
        except Td3RobotError as error:
            return str(error)
        with self._turned:  # the driver answers within a turn; ``follow`` reads the new state after the turn
            turns = self._turns
            self._turned.wait_for(lambda: self._turns > turns, _TURN)
        return ""
