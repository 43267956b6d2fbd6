"""The simulator process: ``python -m td3_robot_sims.node --run DIR``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from td3_robot.errors import ConfigError, UsageError
from td3_robot.runtime import launch
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.util.process_lock import claim
from td3_robot_sims import core as sims_core

_PATIENCE = 10.0  # seconds that one of the name before has to end


def main(arguments: Sequence[str] | None = None) -> int:
    parser = node_parser(
        "sim", f"guest-{os.getpid()}", "Simulate robots: publish what they do, apply what the policy server says."
    )
    return run_node("simulator", parser.parse_args(arguments), _simulate_alone)


def _simulate_alone(node: Node) -> None:
    if not node.supervised:
        _check_guest(node)
    where = f"a simulator of that name takes part in the run in {str(node.run.path)!r}"
    # Servers believe the later one of two simulators: it would be the one that was started after a crash.
    # A supervised one may find one that has not noticed yet that its run has ended.
    patience = _PATIENCE if node.supervised else 0.0
    what = f"simulator {node.name} {node.run.path.resolve()}"
    with claim(what, f"--name is {node.name!r}: {where}", patience, lambda: node.stop_signal):
        _simulate(node)


def _check_guest(node: Node) -> None:
    """Whether a guest may be called so: of two with one name, servers believe the one that was started later.

    Raises:
        UsageError: it is the name of one of the run's own processes.
    """
    with contextlib.suppress(ConfigError):  # a launch description of the user's own, which was moved since
        own = sorted(process.name for process in launch.expand(launch.load(node.config.launch), node.config))
        if node.name in own:
            raise UsageError(f"--name is {node.name!r}, as one of the run's own is called: {', '.join(own)}")


def _simulate(node: Node) -> None:
    config = node.config
    core = sims_core.make(config, node.name, node.incarnation)
    envs, guard = core.envs, core.guard
    node.patient = config.pacing.mode == "fast"
    recorded = node.recorded(core, {})
    for link, accepts in sims_core.ACCEPTS.items():
        node.connect(link, accepts, spec=envs.spec, robots=config.robots)

    def report() -> Figures:
        figures = {"transitions": core.transitions, **core.pacing.figures()}
        return Figures(
            detail=guard.lifecycle.trouble,
            figures=figures,
            counters={**core.counters, "not_finite": envs.not_finite},
        )

    try:
        node.spin(recorded, busy=lambda: False, report=report, after=lambda: guard.finished, deadline=lambda: core.due)
    finally:
        envs.close()


if __name__ == "__main__":
    sys.exit(main())
