"""The simulator process: ``python -m sims.node --run DIR``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from sims import tasks
from sims.core import ACCEPTS, SimulatorCore
from sims.environment import Environment
from sims.fleet import Fleet
from td3_robot import node as nodes
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import make_pacing
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
    node.patient = config.pacing.mode == "fast"
    # At full speed nothing is due by a time: a simulator that is not to move stands still.
    safety = msgspec.structs.replace(config.safety, action_deadline_ms=None) if node.patient else config.safety
    guard = Guard(fleet.spec, node.name, safety)
    core = SimulatorCore(
        fleet, node.name, node.incarnation, lockstep=config.timing == "lockstep", pacing=pacing, guard=guard
    )
    for link, accepts in ACCEPTS.items():
        node.connect(link, accepts, spec=fleet.spec, robots=config.robots)

    def report() -> Figures:
        figures = {"transitions": core.transitions, **pacing.figures()}
        return Figures(
            detail=guard.lifecycle.trouble, figures=figures, counters={**core.counters, "not_finite": fleet.not_finite}
        )

    try:
        node.spin(core, busy=lambda: False, report=report, after=lambda: guard.finished, deadline=lambda: core.due)
    finally:
        fleet.close()


if __name__ == "__main__":
    sys.exit(main())
