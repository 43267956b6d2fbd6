"""The simulator process: ``python -m sims.node --run DIR``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sims import tasks
from sims.core import SimulatorCore
from sims.environment import Environment
from sims.fleet import Fleet
from sims.pacing import make_pacing
from td3_robot import node as nodes
from td3_robot.messages import Action, SimulatorState, Throttle
from td3_robot.node import Figures, Node


def main(arguments: Sequence[str] | None = None) -> int:
    parser = nodes.parser(
        "sim", f"guest-{os.getpid()}", "Simulate robots: publish what they do, apply what the policy server says."
    )
    return nodes.main("simulator", parser.parse_args(arguments), _simulate)


def _simulate(node: Node) -> None:
    config = node.config

    def make(seed: int) -> Environment:
        return tasks.make(config.task, seed, config.randomization)

    fleet = Fleet(make, config.robots, config.seed, node.name, node.incarnation)
    pacing = make_pacing(config.pacing, fleet.spec)
    core = SimulatorCore(fleet, node.name, node.incarnation, lockstep=config.timing == "lockstep", pacing=pacing)
    node.patient = config.pacing.mode == "fast"
    node.connect("policy", (Action,), spec=fleet.spec, robots=config.robots)
    node.connect("learner", (Throttle, SimulatorState), spec=fleet.spec, robots=config.robots)

    def report() -> Figures:
        figures = {"transitions": core.transitions, **pacing.figures()}
        return Figures(figures=figures, counters={**core.counters, "not_finite": core.fleet.not_finite})

    try:
        node.spin(core, busy=lambda: False, report=report, after=lambda: False, deadline=lambda: pacing.deadline)
    finally:
        fleet.close()


if __name__ == "__main__":
    sys.exit(main())
