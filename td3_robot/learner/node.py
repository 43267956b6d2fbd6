"""The learner process: ``python -m td3_robot.learner.node --run DIR``."""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import DivergenceError
from td3_robot.learner.checkpointing.saver import Saver, start
from td3_robot.learner.engine import selection
from td3_robot.learner.metrics_writer import MetricsWriter
from td3_robot.messages import Evaluation, SimulatorState, Step
from td3_robot.runtime import best_policy
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.util import files
from td3_robot.util.process_lock import claim
from td3_robot.util.rate import RateMeter
from td3_robot.util.version import __version__

log = logging.getLogger(__name__)

# The learner waits at most this number of seconds while an earlier learner saves its last checkpoint. The number must
# be less than the supervisor's READY_TIMEOUT.
_PATIENCE = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Learn from the steps of a run's simulators, and publish weights."
    parser = node_parser("td3-robot learner", "learner", description)
    return run_node("learner", parser.parse_args(arguments), _learn_alone)


def _learn_alone(node: Node) -> None:
    # If the supervisor was killed, the earlier learner may still be saving the checkpoint that this learner needs.
    patience = _PATIENCE if node.supervised else 0.0
    refusal = f"another learner is using the run folder {str(node.run.path)!r}"
    with claim(f"learner {node.run.path.resolve()}", refusal, patience, lambda: node.stop_signal):
        _learn(node)


def _learn(node: Node) -> None:
    selection.use_threads(node.config.learner)
    provenance = _provenance(node.config)
    new = not (node.run.replay.exists() or node.run.has_checkpoints)  # the run has no saved state
    core = start(node, provenance)
    recorded = node.recorded(core, {"provenance": provenance, "new": new, "equal_shares": True})
    node.serve(
        "learner",
        {**dict.fromkeys(ROBOT_ROLES, (Step, SimulatorState)), "policy": (), "evaluator": (Evaluation,)},
        core.spec,
    )
    evaluations = core.publisher.evaluations
    # The file of the best policy may be newer than the checkpoint, so the mean return in this file counts, too.
    evaluations.add_earlier(best_policy.mean_return(node.run.best_file))
    if evaluations.reached:
        log.info(
            "a policy of an earlier process reached evaluation.target_return; the policy is in %s",
            node.run.best_file.name,
        )
    saver = Saver(node, core)
    rate = RateMeter(period=0.5, smoothing=5.0)
    writer = MetricsWriter(node.run.metrics_file, node.run.tensorboard)
    with contextlib.closing(writer) as metrics:
        began_at: int | None = None

        def after() -> bool:
            nonlocal began_at
            # Without a checkpoint, the learner reads ``env_steps`` from the replay file when the first simulator joins.
            if began_at is None and core.spec:
                began_at = core.env_steps
            saver.check_successor()
            for record in core.reports.take():
                metrics.write(record)
            if evaluations.best:
                best_policy.keep(node.run.best_file, evaluations.best, evaluations.best_return)
                evaluations.best = None
            saver()
            return core.done and not core.scheduler.unsaved

        def report() -> Figures:
            figures: dict[str, float] = {}
            if began_at is not None:
                figures = core.reports.figures(time.monotonic()) | {"began_at": began_at}
                figures |= rate(time.monotonic(), steps_per_s=core.env_steps, updates_per_s=core.updates)
            return Figures("finished" if core.done else "ready", figures=figures, counters=core.counts())

        try:
            node.spin(recorded, busy=lambda: core.busy, report=report, after=after, stops=saver.stops)
            if core.spec:
                saver.finish()
                saver.check_successor(at_once=True)
                core.publisher.final_bundle().save(node.run.policy_file)
        except DivergenceError:  # the run keeps the newest policy from before the divergence
            if core.reports.sound:
                files.write_atomically(node.run.policy_file, core.reports.sound)
            raise
        for record in core.reports.take():
            metrics.write(record)


def _provenance(config: Config) -> dict[str, Any]:
    return {
        "algorithm": config.learner.algorithm.upper(),
        "task": config.task,
        "seed": config.seed,
        "config": config.to_yaml(),
        "versions": {"td3-robot": __version__, "torch": version("torch"), "python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main())
