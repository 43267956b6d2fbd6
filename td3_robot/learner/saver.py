"""When a learner process saves, and what it starts from."""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from td3_robot.errors import BundleError
from td3_robot.learner import checkpoint, compute, prefill, state
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.factory import make_core
from td3_robot.learner.room import announce
from td3_robot.learner.storage import File, Memory, Storage
from td3_robot.runtime.node import Node
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.specs import RobotSpec

log = logging.getLogger(__name__)

_CUT_TIMEOUT = 8.0  # seconds that a stop waits for the simulators' states; the supervisor's patience is longer


def is_new(run: RunFolder) -> bool:
    """Whether nothing of a learner before is left in this run that the next one goes on from."""
    return not (run.replay.exists() or run.has_checkpoints)


def start(node: Node, provenance: Mapping[str, Any]) -> LearnerCore:
    """A new learner, or the one that the newest whole checkpoint of this run holds.

    Raises:
        BundleError: there are checkpoints and none is whole, or the newest does not fit the configuration.
        ConfigError: what it keeps does not fit.
        OSError: a checkpoint cannot be read.
    """
    checkpoint.tidy(node.run.checkpoints)
    saved = checkpoint.load_newest(node.run.checkpoints)
    loaded = sum(array.nbytes for array in saved[1].values()) if saved else 0

    def admit(spec: RobotSpec) -> None:
        free = compute.free_memory(compute.device(node.config.learner.device))
        log.info(announce(node.config, spec.observation_size, spec.action_size, node.run, free, loaded))

    def room(capacity: int, width: int) -> Storage:
        if node.config.learner.replay_storage == "file":
            recovers = node.config.timing != "lockstep"
            return File(node.run.replay, capacity, width, recovers=recovers, needed=saved is not None)
        return Memory(capacity, width)

    if saved is None:
        core = make_core(node.config, provenance=provenance, storage=room, admit=admit)
        prefill.begin(core)
        return core
    path, arrays, scalars = saved
    core = state.restored(node.config, arrays, scalars, provenance, room, admit)
    log.info("goes on from %s: %d steps, %d updates", path.name, core.env_steps, core.updates)
    return core


class Saver:
    """Saves checkpoints every ``checkpoint.every`` environment steps (or offline updates) and at the end; call it once
    a turn.

    In lock-step a checkpoint is a cut through the whole run, which it asks the core for, and nothing else is one: where
    the simulators do not answer any more, the run goes on from the cut before.
    """

    def __init__(self, node: Node, core: LearnerCore) -> None:
        self._node, self._core = node, core
        self._every = node.config.checkpoint.every
        self._next = self._made + self._every if self._every else sys.maxsize
        self._saved_at = core.env_steps if core.rounds.states else -1
        self._stop_by: float | None = None
        if core.lockstep:
            core.rounds.keep()

    def __call__(self) -> None:
        """Save what is due; go back to the last cut if that is due.

        Raises:
            BundleError: there is nothing whole to go back to.
            OSError: the last checkpoint could not be saved.
        """
        core = self._core
        if core.rounds.setback:
            self._go_back()
        if self._made >= self._next and not core.done:
            self._next = self._made + self._every
            if core.lockstep:
                core.rounds.wanted = True
            else:
                self._save()
        if core.rounds.cut_complete:
            if self._save():
                self._saved_at = core.env_steps
            elif core.done:
                raise self._failed()
            core.rounds.taken()

    @property
    def _made(self) -> int:
        """Environment steps, and the offline updates before them."""
        return self._core.env_steps + min(self._core.updates, self._core.limiter.offline)

    @property
    def settled(self) -> bool:
        """Whether nothing has to be waited for before :meth:`finish`: in lock-step, the last cut."""
        return not self._core.lockstep or self._saved_at == self._core.env_steps

    def stops(self) -> bool:
        """Whether a learner that was told to stop can: in lock-step, once a last cut is taken or cannot be had."""
        rounds, now = self._core.rounds, time.monotonic()
        if not self._core.lockstep or not self._core.sources.live():
            return True
        if self._stop_by is None:
            self._stop_by, rounds.wanted = now + _CUT_TIMEOUT, True
        return not rounds.moved or now > self._stop_by

    def finish(self) -> None:
        """Save for the last time, after the last turn.

        Raises:
            OSError: that failed.
        """
        if self._core.lockstep:
            if not self.settled:
                log.warning("stopped between two cuts: the run will go on from %d steps", max(0, self._saved_at))
        elif not self._save():
            raise self._failed()

    def _failed(self) -> OSError:
        return OSError(errno.ENOSPC, "the last checkpoint could not be saved", str(self._node.run.checkpoints))

    def _save(self) -> bool:
        """Save a checkpoint; a full disk costs the checkpoint, not the training."""
        begin = time.monotonic()
        node, core = self._node, self._core
        arrays, scalars = state.save(core, begin)
        try:
            path = checkpoint.save(node.run.checkpoints, core.env_steps, arrays, scalars, node.config.checkpoint.keep)
        except OSError as error:
            node.counters["checkpoints_failed"] += 1
            log.error("checkpoint at %d steps failed: %s: %s", core.env_steps, error.filename, error.strerror)
            return False
        log.info("saved %s in %.2f s", path.name, time.monotonic() - begin)
        return True

    def _go_back(self) -> None:
        """Lock-step: put the newest cut into the running core."""
        saved = checkpoint.load_newest(self._node.run.checkpoints)
        if saved is None:
            raise BundleError("a simulator was lost, and the checkpoint that all had to go back to is gone")
        path, arrays, scalars = saved
        state.restore(self._core, arrays, scalars)
        self._core.went_back()
        self._next = self._core.env_steps + self._every if self._every else sys.maxsize
        self._saved_at = self._core.env_steps
        log.info("went back to %s, because a simulator was lost", path.name)
