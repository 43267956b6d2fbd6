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
from td3_robot_sims import simulator

_PATIENCE = 10.0  # s to wait for the previous simulator of the same name to end


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Simulate robots: publish their Steps, apply the policy server's Actions."
    parser = node_parser("td3-robot sim", "guest-PID", description)
    parser.set_defaults(name=f"guest-{os.getpid()}")
    return run_node("simulator", parser.parse_args(arguments), _simulate_alone)


def _simulate_alone(node: Node) -> None:
    if not node.supervised:
        _check_guest(node)
    where = f"a simulator of that name takes part in the run in {str(node.run.path)!r}"
    # If two simulators have the same name, servers accept only the newer one. A supervised simulator waits until the
    # older simulator with its name ends. The older simulator sometimes notices late that its run has ended.
    patience = _PATIENCE if node.supervised else 0.0
    what = f"simulator {node.name} {node.run.path.resolve()}"
    with claim(what, f"--name is {node.name!r}: {where}", patience, lambda: node.stop_signal):
        _simulate(node)


def _check_guest(node: Node) -> None:
    """Check the name of a guest: a simulator that a person adds to a run.

    Raises:
        UsageError: a process of the run has the same name. Servers would accept the guest instead of the run's process.
    """
    with contextlib.suppress(ConfigError):  # the user may have moved the launch description
        own = sorted(process.name for process in launch.expand(launch.load(node.config.launch), node.config))
        if node.name in own:
            raise UsageError(
                f"--name is {node.name!r}: a process of the run has this name; the run's processes: {', '.join(own)}"
            )


def _simulate(node: Node) -> None:
    config = node.config
    core = simulator.make(config, node.name, node.incarnation)
    envs, guard = core.envs, core.guard
    node.outbox.patient = config.pacing.mode == "fast"
    recorded = node.recorded(core, {})
    for link, accepts in sims_core.ACCEPTS.items():
        node.connect(link, accepts, spec=envs.spec, robots=config.robots)

    def report() -> Figures:
        return Figures(
            detail=guard.lifecycle.trouble,
            figures=core.figures(),
            counters={**core.counters, "not_finite": envs.not_finite},
        )

    try:
        node.spin(recorded, busy=lambda: False, report=report, after=lambda: guard.finished, deadline=lambda: core.due)
    finally:
        envs.close()


if __name__ == "__main__":
    sys.exit(main())
