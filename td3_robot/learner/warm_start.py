"""Starts a new learner with a policy (``learner.start_from``), recorded transitions (``learner.recordings``) or both.

The command line also calls :func:`check`, without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from td3_robot.bundle import OBSERVATION_MEAN, Bundle
from td3_robot.config.learner import LearnerConfig
from td3_robot.errors import BundleError, SessionError
from td3_robot.learner.experience.transitions import Assembler
from td3_robot.messages import Step
from td3_robot.specs import RobotSpec

if TYPE_CHECKING:
    from td3_robot.learner.core import LearnerCore
    from td3_robot.learner.training import Training

log = logging.getLogger(__name__)

_KEY = "learner.start_from"


def check(bundle: Bundle, spec: RobotSpec, hidden: tuple[int, ...], learner: LearnerConfig) -> None:
    """Raise BundleError if learning cannot start from this policy, for this robot and with these settings."""
    if difference := spec.difference(bundle.spec):
        raise BundleError(f"{_KEY}: that policy is for another robot: {difference}")
    if bundle.hidden != hidden:
        raise BundleError(
            f"{_KEY}: that policy has the hidden layers {list(bundle.hidden)}, network.hidden is {list(hidden)}; "
            "they must be the same"
        )
    normalised = OBSERVATION_MEAN in bundle.tensors
    if normalised != learner.normalise_observations:
        raise BundleError(
            f"{_KEY}: that policy {'normalises' if normalised else 'does not normalise'} its observations; "
            f"learner.normalise_observations must be {str(normalised).lower()}"
        )
    if normalised:
        observations(bundle)


def observations(bundle: Bundle) -> int:
    """The number of observations from which a policy's mean and deviation were computed."""
    count = bundle.provenance.get("env_steps")
    if not isinstance(count, int) or count < 1:
        raise BundleError(
            f"{_KEY}: that policy normalises observations, but env_steps in its provenance is {str(count)[:40]}; "
            "env_steps must be the number of observations from which the mean was computed (1 or more)"
        )
    return count


def begin(core: LearnerCore) -> None:
    """Load the configured policy and recordings into a new core."""
    file, recordings = core.config.learner.start_from, core.config.learner.recordings
    if file:
        from td3_robot.policies import find_policy  # imported here, because it imports the policy server's actor

        path = find_policy(file)
        bundle = Bundle.load(path)
        core.start(bundle.spec, bundle)
        log.info("the learner starts with the actor of %s", path)
    if not recordings:
        return
    from td3_robot.recording import experience  # imported here, because it needs the extra for recordings

    sessions = experience.recordings([Path(file) for file in recordings])
    counts = prefill(core, (experience.read(*parts) for parts in sessions))
    for parts, count in zip(sessions, counts, strict=True):
        log.info("%s: stored %d transitions", ", ".join(map(str, parts)), count)
    if core.learning.offline and not core.training.experience.ready:
        only = f"; operators chose all {sum(counts)} actions, so set learner.operator_share to 0" if any(counts) else ""
        raise SessionError(f"learner.recordings {', '.join(recordings)}: no transitions for the offline updates{only}")


def prefill(core: LearnerCore, recordings: Iterable[tuple[RobotSpec, Iterable[Step]]]) -> list[int]:
    """Store the transitions of recorded Steps. The number of environment steps does not include them.

    If the replay file has a note of an earlier process, that process has already stored the recorded transitions. Then
    this function stores nothing.

    Returns:
        The number of stored transitions of each recording.
    """
    counts: list[int] = []
    stored_before = False
    for spec, steps in recordings:
        if core.spec is None:
            core.start(spec)
        elif difference := core.spec.difference(spec):
            raise BundleError(f"the recorded Steps are of another robot: {difference}")
        training = core.training
        stored_before = stored_before or bool(training.storage.notes)
        before = _rows(training)
        assemblers: dict[str, Assembler] = {}
        for step in () if stored_before else steps:
            transitions = assemblers.setdefault(step.source, Assembler()).add(step)
            if transitions is not None and len(transitions):
                training.store(transitions, step)
        training.experience.end()
        counts.append(_rows(training) - before)
    if counts and not stored_before:
        core.training.note(core.env_steps, "", {})
    return counts


def _rows(training: Training) -> int:
    """The number of rows ever added to the replay buffer, and to the separate buffer for an operator's transitions."""
    from td3_robot.learner.replay_buffer.buffer import ReplayBuffer  # imported here, because it needs torch

    return sum(part.total_added for part in training.parts().values() if isinstance(part, ReplayBuffer))
