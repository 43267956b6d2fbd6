"""The policy server process: ``python -m td3_robot.policy.node --run DIR``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from td3_robot import node as nodes
from td3_robot.messages import Step, Weights
from td3_robot.node import Figures, Node
from td3_robot.policy.core import PolicyCore
from td3_robot.specs import RobotSpec
from td3_robot.transport.session import ROBOT_ROLES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = nodes.parser("policy", "policy", "Answer the observations of a run's simulators with actions.")
    return nodes.main("policy", parser.parse_args(arguments), _serve)


def _serve(node: Node) -> None:
    core = PolicyCore(node.config.seed, lockstep=node.config.timing == "lockstep")
    node.serve("policy", dict.fromkeys(ROBOT_ROLES, (Step,)))
    learner = node.connect("learner", (Weights,))
    served: RobotSpec | None = None

    def after() -> bool:
        nonlocal served
        if core.version != learner.hello.weights_version:
            learner.hello = replace(learner.hello, weights_version=core.version)
        if served is None and core.spec:
            served = core.spec
            node.bus.adopt("policy", served)
        return False

    def report() -> Figures:
        # Ready means bound: weights come once a simulator has told the learner which robot this is.
        return Figures("ready", figures={"weights_version": core.version}, counters=dict(core.counters))

    node.spin(core, busy=lambda: False, report=report, after=after)


if __name__ == "__main__":
    sys.exit(main())
