"""The process of a driver: it connects a robot to its policy server, and keeps the robot's control period and safety.

A driver is a program of a few lines::

    class Leg(Robot):
        spec = RobotSpec(...)
        def observe(self): ...
        def apply(self, action): ...

    if __name__ == "__main__":
        sys.exit(main(Leg(), "leg"))
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from td3_robot.driver.core import ACCEPTS, SourceCore, make
from td3_robot.driver.lateness import Lateness
from td3_robot.driver.robot import Robot, RobotBody
from td3_robot.errors import HandshakeError
from td3_robot.recording.boundary import RecordedBody
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.safety.limits import SafetyConfig, check_deadlines
from td3_robot.specs import RobotSpec
from td3_robot.transport.endpoints import absolute
from td3_robot.util.process_lock import claim

log = logging.getLogger(__name__)

_EPILOG = """examples:
  PROGRAM --config robot.yaml
  PROGRAM --run runs/leg           (take part in a training)"""


def main(robot: Robot, name: str, arguments: Sequence[str] | None = None) -> int:
    """Drive a robot until a signal arrives or an operator sends ``shutdown``.

    At the end the driver applies the safe action, unless SIGKILL or a hanging method ends the process. If another
    driver with the same name is possibly controlling the robot, this driver does not touch the robot.

    Args:
        name: name of this robot at its policy server; the option ``--name`` replaces it.
        arguments: arguments of the command line, see ``--help``.

    Returns:
        The exit code of the process.

    Raises:
        TypeError: ``robot`` is not an object of a subclass of Robot, or its ``spec`` is not a RobotSpec.
    """
    if not isinstance(robot, Robot):
        raise TypeError(f"robot is {robot!r:.100}; allowed: an object of a subclass of Robot, such as MyRobot()")
    spec = getattr(robot, "spec", None)
    if not isinstance(spec, RobotSpec):
        raise TypeError(f"{type(robot).__name__}.spec is {spec!r:.100}; allowed: a RobotSpec")
    parser = node_parser(name, name, f"Drive the robot {robot.spec.name}.", deployable=True, epilog=_EPILOG)
    return run_node("driver", parser.parse_args(arguments), lambda node: drive(node, robot))


def unset(safety: SafetyConfig) -> str:
    """Return a warning about missing safety settings of a deployed driver, or an empty text if none is missing."""
    missing = {
        "safety.action_deadline_ms": "without the policy server, the last action holds for ever",
        "safety.hang_ms": "if a method of the robot does not return, the last action holds for ever",
        "safety.safe_action": "in FAULT and after an emergency stop, the last action holds for ever",
    }
    lines = [f"{key} is not set: {what}" for key, what in missing.items() if getattr(safety, key[7:]) is None]
    return f"NOT SAFE: {'; '.join(lines)}; set them in the configuration" if lines else ""


def drive(node: Node, robot: Robot, follow: Callable[[SourceCore], None] | None = None) -> None:
    """Drive a robot until the node stops. After each turn, call ``follow(core)``, which may read the core's state."""
    endpoint = absolute(node.endpoint("policy"))
    where = f"this machine already runs a driver with this name for the policy server at {endpoint}"
    # The policy server refuses a second driver of the same name. This lock also works while no policy server runs.
    with claim(f"driver {node.name} {endpoint}", f"--name is {node.name!r}: {where}"):
        _drive_alone(node, robot, follow)


def _drive_alone(node: Node, robot: Robot, follow: Callable[[SourceCore], None] | None) -> None:
    config = node.config
    check_deadlines(config.safety, robot.spec)
    hang_ms = config.safety.hang_ms
    body = RobotBody(robot, None if hang_ms is None else hang_ms / 1e3)
    learner = bool(node.folder or config.endpoints.learner)
    observed: Any = RecordedBody(body)
    core = make(observed, config, node.name, node.incarnation, learner=learner)
    guard, pacing = core.guard, core.pacing
    assert pacing, "a driver works in real time"
    lateness = Lateness(node.name, robot.spec.control_period, config.realtime.missed_share)
    if not node.folder and (missing := unset(config.safety)):
        log.warning("%s", missing)
    node.outbox.patient = False
    recorded = node.recorded(core, {"learner": learner, "spec": robot.spec.describe()}, observed.observe)
    policy = node.connect("policy", ACCEPTS["policy"], spec=robot.spec, robots=1)
    if learner:
        node.connect("learner", ACCEPTS["learner"], spec=robot.spec, robots=1, essential=False)

    def report() -> Figures:
        return Figures("ready", guard.lifecycle.trouble, core.figures(), {**core.counters, **guard.counters})

    def after() -> bool:
        if follow:
            follow(core)
        pacing.loop.report(log, node.name, config.realtime.missed_share)
        lateness.turn(time.monotonic(), core.counters["steps"], core.counters["late_actions"])
        return guard.finished

    sift = partial(node.tell_core, lambda: Figures("running", figures=pacing.figures()))
    try:
        node.spin(recorded, busy=lambda: False, report=report, after=after, deadline=lambda: core.due, sift=sift)
    except HandshakeError:
        if policy.refusal:
            core.contact.refused(rival=policy.refusal.code == "name")
            if core.contact.in_charge:
                log.warning("%s: refused by the policy server; the driver applies the safe action and ends", node.name)
        raise
    finally:
        if core.contact.in_charge:
            core.make_safe()
            body.close()
