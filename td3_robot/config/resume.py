"""Compares the configuration of a run with another configuration.

A resume can change a key only if the user has set it and it is not in ``FIXED``. A sweep changes no key of an existing
run.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from td3_robot.config.schema import Config
from td3_robot.config.section import flat
from td3_robot.errors import UsageError

FIXED = {
    "task": "the run's policy has learned the old task",
    "seed": "the run has used the random numbers of the old seed",
    "timing": "the run's checkpoints fit only the old timing",
    "network.hidden": "the run's networks have the old shape",
    "learner.layer_norm": "the run's critics have the old layers",
    "learner.algorithm": "the run's networks belong to the old algorithm",
    "learner.twin_critics": "the run has the old number of critics",
    "learner.discount": "the run's replay buffer holds the old discount",
    "learner.n_step": "the run's replay buffer holds sums over the old number of steps",
    "learner.replay": "the run's replay buffer is of the old kind",
    "learner.normalise_observations": "the run's networks have learned with the old setting",
    "learner.policy_average": "the run's average of the actor began with the old rate",
    "learner.learning_starts": "the run counts its updates from the step in the old setting",
    "learner.replay_ratio": "the run counts its updates with the old ratio",
    "learner.recordings": "the run read the recordings at its start",
    "learner.offline_updates": "the run has made its offline updates",
    "launch": "the run's checkpoints belong to the processes of the old launch description",
    "learner.buffer_size": "the run's replay buffer has the old size",
    "learner.operator_share": "it determines the buffer in which the run stores an operator's transitions",
    "learner.replay_storage": "the run's replay buffer is stored in the old place",
    "learner.start_from": "the run's actor started with the old setting",
}
"""Keys that cannot change at a resume, each with the reason."""
OF_THE_MACHINE = ("learner.device", "learner.threads", "learner.threads_in", "learner.compile", "cluster", "endpoints")
"""Keys that depend only on the machine of the run. The name of a section means all its keys."""
FIXED_IN_LOCKSTEP = {
    "simulators": "each simulator continues from its saved state",
    "robots": "each simulator continues from its saved state",
}


def differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Return the full names of the keys whose values differ, each with its old and new value."""
    old, new = flat(msgspec.to_builtins(before)), flat(msgspec.to_builtins(after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def disagreements(stored: Config, asked: Config) -> list[str]:
    """Return the keys that differ between a run and a command, each as ``key is A in the run, B now``.

    Keys of the machine do not count. If the command asks for the precision ``auto``, every precision agrees, because a
    run stores the chosen precision instead of ``auto``.
    """
    return [
        f"{key} is {_text(old)} in the run, {_text(new)} now"
        for key, (old, new) in differences(stored, asked).items()
        if (key, new) != ("learner.precision", "auto") and not _among(key, OF_THE_MACHINE)
    ]


def accepted(before: Config, after: Config, declared: Collection[str]) -> list[str]:
    """Check the changes at a resume, and return them, each as ``key: old → new``.

    Args:
        before: the configuration of the run's last training.
        after: the configuration to resume with. ``before`` and ``after`` contain the chosen values instead of ``auto``,
            except on a cluster where the learner itself chooses. So the check notices if ``auto`` chooses another
            device at this resume.
        declared: keys that the user wants to change. The name of a section means all its keys.

    Raises:
        UsageError: a changed key is fixed, or the user did not set it.
    """
    changed = differences(before, after)
    fixed = FIXED | (FIXED_IN_LOCKSTEP if before.timing == "lockstep" else {})
    for key, (old, new) in changed.items():
        if key in fixed:
            raise UsageError(
                f"{key} is {_text(old)} in the run and cannot become {_text(new)}: {fixed[key]}; start a new run"
            )
    undeclared = [key for key in changed if not _among(key, declared)]
    if undeclared:
        values = [(key, *map(_text, changed[key])) for key in undeclared]
        raise UsageError(
            "the configuration differs from the configuration of the run: "
            f"{'; '.join(f'{key} is {old} in the run, {new} now' for key, old, new in values)}; "
            f"to accept the change, add {' '.join(f'--set {key}={new}' for key, _, new in values)}; "
            "in Python, use overrides"
        )
    return [f"{key}: {_text(old)} → {_text(new)}" for key, (old, new) in changed.items()]


def _among(key: str, names: Collection[str]) -> bool:
    """Whether a key has one of the names, or belongs to a section that has one of the names."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _text(value: Any) -> str:
    """Return a value as text for ``--set``."""
    return msgspec.json.encode(value).decode()
