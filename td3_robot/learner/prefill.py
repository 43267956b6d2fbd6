"""What a new learner begins with: a policy, ``learner.start_from``, and the transitions of ``learner.recordings``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from td3_robot.bundle import Bundle
from td3_robot.errors import BundleError, SessionError
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.transitions import Assembler
from td3_robot.messages import Step
from td3_robot.specs import RobotSpec

log = logging.getLogger(__name__)


def begin(core: LearnerCore) -> None:
    """Take over the actor of the policy, and store what the recordings hold, that the configuration names.

    Raises:
        BundleError: the policy or a recording does not fit.
        SessionError: a recording cannot be read.
    """
    file, recordings = core.config.learner.start_from, core.config.learner.recordings
    if file:
        bundle = Bundle.load(Path(file))
        core.start(bundle.spec, bundle)
        log.info("begins with the actor of %s", file)
    if not recordings:
        return
    from td3_robot.recording import (
        experience,  # here, because only who learns from recordings needs the package for them
    )

    sessions = experience.recordings([Path(file) for file in recordings])
    counts = prefill(core, (experience.read(*parts) for parts in sessions))
    for parts, count in zip(sessions, counts, strict=True):
        log.info("%s: %d transitions to begin with", ", ".join(map(str, parts)), count)
    if core.learning.offline and not core.training.ready:
        raise SessionError(f"nothing to learn from offline: {', '.join(recordings)}: no transition is in there")


def prefill(core: LearnerCore, recordings: Iterable[tuple[RobotSpec, Iterable[Step]]]) -> list[int]:
    """Store the transitions that the Steps of recordings make, as if they had come from sources of now.

    They count as no environment steps, and no gap between them and what comes later is one. The last steps of each
    recording make n-step returns of the rewards there are. Nothing is stored where rows outlived a process: theirs are
    among them.

    Returns:
        How many were stored of each.

    Raises:
        BundleError: one is another robot's.
    """
    counts: list[int] = []
    outlived = False
    for spec, steps in recordings:
        if core.spec is None:
            core.start(spec)
        elif difference := core.spec.difference(spec):
            raise BundleError(f"recorded Steps are another robot's: {difference}")
        replay = core.training.replay
        outlived = outlived or bool(replay.storage.notes)
        before = replay.total_added
        assemblers: dict[str, Assembler] = {}
        for step in () if outlived else steps:
            transitions = assemblers.setdefault(step.source, Assembler()).add(step)
            if transitions is not None and len(transitions):
                core.training.store(transitions, step)
        core.training.end()
        counts.append(replay.total_added - before)
    if counts and not outlived:
        core.training.note(core.env_steps, "", {})
    return counts
