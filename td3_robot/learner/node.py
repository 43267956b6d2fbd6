"""The learner process: ``python -m td3_robot.learner.node --run DIR``."""

from __future__ import annotations

import contextlib
import errno
import logging
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from td3_robot import node as nodes
from td3_robot.bundle import Bundle
from td3_robot.config import Config
from td3_robot.errors import BundleError
from td3_robot.learner import checkpoint, compute
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.metrics import MetricsWriter
from td3_robot.messages import Evaluation, Step
from td3_robot.node import Figures, Node
from td3_robot.transport.session import ROBOT_ROLES

log = logging.getLogger(__name__)

_BEST = "eval_return_mean"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = nodes.parser("learner", "learner", "Learn from the steps of a run's simulators, and publish weights.")
    return nodes.main("learner", parser.parse_args(arguments), _learn)


def _learn(node: Node) -> None:
    compute.use_threads(node.config.learner.threads)
    core = _core(node)
    node.serve(
        "learner",
        {**dict.fromkeys(ROBOT_ROLES, (Step,)), "policy": (), "evaluator": (Evaluation,)},
        core.spec,
    )
    core.best_return = max(core.best_return, _best_return(node))
    every = node.config.checkpoint.every
    next_checkpoint = core.env_steps + every if every else sys.maxsize
    rate = Rates()
    with MetricsWriter(node.run.metrics_file, node.run.tensorboard) as metrics:

        def after() -> bool:
            nonlocal next_checkpoint
            for record in core.take_records():
                metrics.write(record)
            if core.best:
                _keep_best(node, core.best, core.best_return)
                core.best = None
            if core.env_steps >= next_checkpoint and not core.done:
                next_checkpoint = core.env_steps + every
                _save(node, core)
            return core.done

        def report() -> Figures:
            figures = core.figures(time.monotonic()) | rate(core.env_steps, core.updates)
            return Figures("finished" if core.done else "ready", figures=figures, counters=core.counts())

        node.spin(core, busy=lambda: core.update_due, report=report, after=after)
        if core.spec:
            if not _save(node, core):
                raise OSError(errno.ENOSPC, "the last checkpoint could not be saved", str(node.run.checkpoints))
            core.final_bundle().save(node.run.policy_file)
            for record in core.take_records():
                metrics.write(record)


def _core(node: Node) -> LearnerCore:
    """A new learner, or the one that the newest whole checkpoint of this run holds."""
    provenance = _provenance(node.config)
    saved = checkpoint.load_newest(node.run.checkpoints)
    if saved is None:
        core = LearnerCore(node.config, provenance=provenance)
        _prefill(core, node.config.learner.recordings)
        return core
    path, arrays, scalars = saved
    core = LearnerCore.restored(node.config, arrays, scalars, provenance)
    log.info("goes on from %s: %d steps, %d updates", path.name, core.env_steps, core.updates)
    return core


def _prefill(core: LearnerCore, files: Sequence[str]) -> None:
    """Begin with what recordings hold."""
    if not files:
        return
    from td3_robot.session import experience  # here, because only who learns from recordings needs the package for them

    for file in files:
        log.info("%s: %d transitions to begin with", file, core.prefill(*experience.read(Path(file))))


def _save(node: Node, core: LearnerCore) -> bool:
    """Save a checkpoint; a full disk costs the checkpoint, not the training."""
    begin = time.monotonic()
    arrays, scalars = core.state(begin)
    try:
        path = checkpoint.save(node.run.checkpoints, core.env_steps, arrays, scalars, node.config.checkpoint.keep)
    except OSError as error:
        node.counters["checkpoints_failed"] += 1
        log.error("checkpoint at %d steps failed: %s", core.env_steps, error.strerror)
        return False
    log.info("saved %s in %.2f s", path.name, time.monotonic() - begin)
    return True


def _keep_best(node: Node, payload: bytes, mean: float) -> None:
    """Write the best policy so far, with the return that made it so."""
    bundle = Bundle.decode(payload)
    replace(bundle, provenance={**bundle.provenance, _BEST: mean}).save(node.run.best_file)


def _best_return(node: Node) -> float:
    """What the best policy of this run had, as its file says: a checkpoint may be from before it."""
    with contextlib.suppress(BundleError, TypeError, ValueError):
        return float(Bundle.load(node.run.best_file).provenance.get(_BEST, "-inf"))
    return float("-inf")


def _provenance(config: Config) -> dict[str, Any]:
    return {
        "algorithm": "TD3",
        "task": config.task,
        "seed": config.seed,
        "config": config.to_yaml(),
        "versions": {"td3-robot": version("td3-robot"), "torch": version("torch"), "python": platform.python_version()},
    }


class Rates:
    """Steps and updates a second since the last call, smoothed over about five seconds."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None
        self._rates = {"steps_per_s": 0.0, "updates_per_s": 0.0}

    def __call__(self, env_steps: int, updates: int) -> dict[str, float]:
        now = time.monotonic()
        if self._last is None:
            self._last = now, env_steps, updates
        elif now - self._last[0] >= 0.5:
            seconds = now - self._last[0]
            weight = 1.0 if not self._rates["steps_per_s"] else min(1.0, seconds / 5.0)
            for key, delta in (("steps_per_s", env_steps - self._last[1]), ("updates_per_s", updates - self._last[2])):
                self._rates[key] += weight * (delta / seconds - self._rates[key])
            self._last = now, env_steps, updates
        return dict(self._rates)


if __name__ == "__main__":
    sys.exit(main())
