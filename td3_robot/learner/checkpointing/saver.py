"""Creates the learner's core, from a checkpoint if there is one, and saves checkpoints."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from td3_robot.errors import BundleError, NodeError
from td3_robot.learner import compute, warm_start
from td3_robot.learner.checkpointing import checkpoint, state
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.factory import make_core, networks
from td3_robot.learner.replay_buffer.storage import File, Storage
from td3_robot.learner.resources import announce
from td3_robot.runtime.node import Node
from td3_robot.specs import RobotSpec
from td3_robot.util import files

log = logging.getLogger(__name__)

_LOOK_PERIOD = 1.0  # seconds between two checks whether a later learner continues the run
_SNAPSHOT_TIMEOUT = 8.0  # seconds to wait for the simulators' states at exit; the supervisor waits longer for the exit


def start(node: Node, provenance: Mapping[str, Any]) -> LearnerCore:
    """Create the learner's core. It continues from the newest undamaged checkpoint, if there is one."""
    checkpoint.tidy(node.run.checkpoints)
    saved = checkpoint.load_newest(node.run.checkpoints)
    loaded = sum(array.nbytes for array in saved[1].values()) if saved else 0

    def admit(spec: RobotSpec) -> None:
        free = compute.free_memory(compute.device(node.config.learner.device))
        sizes = spec.observation_size, spec.action_size
        log.info(announce(node.config, *sizes, node.run, free, loaded, networks(node.config, spec)))

    def make_storage(capacity: int, width: int) -> Storage:
        if node.config.learner.replay_storage == "file":
            recovers = node.config.timing != "lockstep"
            return File(node.run.replay, capacity, width, recovers=recovers, needed=saved is not None)
        return Storage(capacity, width)

    core = make_core(node.config, provenance=provenance, storage=make_storage, admit=admit)
    if saved is None:
        warm_start.begin(core)
    else:
        path, arrays, scalars = saved
        state.resume(core, arrays, scalars)
        log.info("the learner continues from %s: %d steps, %d updates", path.name, core.env_steps, core.updates)
    return core


class Saver:
    """Saves checkpoints during a run, and one at the end.

    Environment steps and offline updates count together. When this count has grown by ``checkpoint.every``, the next
    checkpoint is due. In lock-step, the saver also saves a checkpoint at the start of a new run.

    Call the saver once in each turn of the node's loop. When a checkpoint is due, the saver requests a snapshot from
    the scheduler. It saves the snapshot in the turn in which the snapshot is ready.
    """

    def __init__(self, node: Node, core: LearnerCore) -> None:
        self._node, self._core, self._scheduler = node, core, core.scheduler
        self._mine = self._take_over()
        self._next_look = float("-inf")
        self._next = self._after_now()
        self._saved_at = core.env_steps if core.scheduler.simulator_states else -1
        self._stop_by: float | None = None

    def __call__(self) -> None:
        """Save a checkpoint if it is due. Restore the newest snapshot if the scheduler asks for it."""
        if self._scheduler.must_roll_back:
            self._roll_back()
        if self._made >= self._next and not self._core.done:
            self._next = self._after_now()
            self._scheduler.request_snapshot()
        if self._scheduler.snapshot_ready:
            self._save(last=self._core.done)
            self._scheduler.snapshot_saved()

    def _take_over(self) -> str:
        """Write a random text into the run folder, and return it. A later learner of this run replaces the text."""
        mine = secrets.token_hex(8)
        try:
            files.write_atomically(self._node.run.learner_file, mine.encode())
        except OSError as error:  # a full disk
            log.warning(
                "%s: %s; this learner cannot notice if another learner continues the run",
                error.filename,
                error.strerror,
            )
            return ""
        return mine

    def check_successor(self, *, at_once: bool = False) -> None:
        """Check that no later learner continues this run.

        On a cluster, a host can lose its connection to Ray and still reach the run folder. The supervisor then starts
        a learner on another host.

        Args:
            at_once: look into the run folder even if the last look was less than a second ago.

        Raises:
            NodeError: a later learner continues the run. This learner must write nothing more.
        """
        now = time.monotonic()
        if now < self._next_look and not at_once:
            return
        self._next_look = now + _LOOK_PERIOD
        with contextlib.suppress(OSError):  # the file cannot be read: assume that there is no later learner
            if self._mine and self._node.run.learner_file.read_text() != self._mine:
                raise NodeError("another learner continues this run; this learner saves nothing more")

    @property
    def _made(self) -> int:
        """The number of environment steps plus offline updates so far."""
        return self._core.env_steps + min(self._core.updates, self._core.learning.limiter.offline)

    def _after_now(self) -> int:
        """The value of ``_made`` at which the next checkpoint is due."""
        return self._made + (self._node.config.checkpoint.every or sys.maxsize)

    def stops(self) -> bool:
        """Whether a stopping learner can exit.

        It can exit if everything is saved, if no source is connected, or if the simulators did not answer in time.
        """
        if not self._scheduler.unsaved or not self._core.sources.live():
            return True
        now = time.monotonic()
        if self._stop_by is None:
            self._stop_by = now + _SNAPSHOT_TIMEOUT
            self._scheduler.request_snapshot()
        return now > self._stop_by

    def finish(self) -> None:
        """Save the last checkpoint, after the last turn. Warn if there is no snapshot of the newest step."""
        self._scheduler.request_snapshot()
        if self._scheduler.snapshot_ready:
            self._save(last=True)
        elif self._saved_at != self._core.env_steps:
            log.warning("stopped between two snapshots: a resumed run continues at step %d", max(0, self._saved_at))

    def _save(self, *, last: bool) -> None:
        """Save a checkpoint. If writing fails, training continues; for the last checkpoint, raise OSError instead."""
        self.check_successor(at_once=True)
        begin = time.monotonic()
        core, run = self._core, self._node.run
        arrays, scalars = state.save(core, begin)
        try:
            path = checkpoint.save(run.checkpoints, core.env_steps, arrays, scalars, core.config.checkpoint.keep)
        except OSError as error:
            self._node.counters["checkpoints_failed"] += 1
            log.error("checkpoint at %d steps failed: %s: %s", core.env_steps, error.filename, error.strerror)
            if last:
                raise OSError(error.errno, "the last checkpoint could not be saved", str(run.checkpoints)) from None
            return
        self._saved_at = core.env_steps
        log.info("saved %s in %.2f s", path.name, time.monotonic() - begin)

    def _roll_back(self) -> None:
        """Restore the newest snapshot in the running core."""
        saved = checkpoint.load_newest(self._node.run.checkpoints)
        if saved is None:
            raise BundleError("a simulator was lost, and there is no checkpoint to which the run can return")
        path, arrays, scalars = saved
        state.restore(self._core, arrays, scalars)
        self._core.rolled_back()
        self._next = self._after_now()
        self._saved_at = self._core.env_steps
        log.info("rolled back to %s, because the run lost a simulator", path.name)
