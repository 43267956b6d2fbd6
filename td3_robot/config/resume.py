"""What of a run's configuration may change when it goes on: nothing by accident, and not what the run consists of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from td3_robot.config.schema import Config
from td3_robot.errors import UsageError

_MADE_OF = {
    "task": "another task is another run",
    "seed": "its random streams have begun",
    "timing": "one cannot go on from the other's checkpoints",
    "network.hidden": "its networks have that shape",
    "learner.layer_norm": "its networks have that shape",
    "learner.algorithm": "its networks are those of the other one",
    "learner.twin_critics": "its networks are so many",
    "learner.discount": "what its replay buffer holds was discounted with it",
    "learner.n_step": "what its replay buffer holds was added up over so many steps",
    "learner.replay": "its replay buffer is of that kind",
    "learner.normalise_observations": "its networks have learned from observations like that",
    "learner.policy_average": "its average is kept from the start, at that pace",
    "learner.learning_starts": "its updates are counted from there",
    "learner.replay_ratio": "its updates are counted at that ratio from the start",
    "learner.recordings": "they were read when it began",
    "learner.offline_updates": "its updates are counted from there",
    "launch": "other processes are another run",
    "learner.buffer_size": "its replay buffer has that size",
    "learner.replay_storage": "its replay buffer is there",
    "learner.start_from": "its actor has begun",
}
_MADE_OF_LOCKSTEP = {
    "simulators": "each of its simulators goes on from its own state",
    "robots": "each of its simulators goes on from its own state",
}


def differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values are not the same, with full names: the value before, and after."""
    old, new = _leaves(msgspec.to_builtins(before)), _leaves(msgspec.to_builtins(after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def accepted(before: Config, after: Config, declared: Collection[str]) -> list[str]:
    """The changes, each as ``key: old → new``.

    Args:
        before, after: what the run was trained with, and is to go on with; what was ``auto`` is settled in both, so
            that another device or precision is a change like any other.
        declared: keys that are meant to change; a section stands for all its keys.

    Raises:
        UsageError: another key changes too, or one that a run cannot go on with.
    """
    changed = differences(before, after)
    fixed = _MADE_OF | (_MADE_OF_LOCKSTEP if before.timing == "lockstep" else {})
    for key, (old, new) in changed.items():
        if key in fixed:
            raise UsageError(
                f"{key} is {_text(old)} in the run and cannot become {_text(new)}: {fixed[key]}; start a new run"
            )
    undeclared = [key for key in changed if not any(key == name or key.startswith(f"{name}.") for name in declared)]
    if undeclared:
        values = [(key, *map(_text, changed[key])) for key in undeclared]
        raise UsageError(
            "the configuration differs from what the run was trained with: "
            f"{'; '.join(f'{key} is {old} there, {new} now' for key, old, new in values)}; "
            f"if meant, say {' '.join(f'--set {key}={new}' for key, _, new in values)}"
        )
    return [f"{key}: {_text(old)} → {_text(new)}" for key, (old, new) in changed.items()]


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}.{key}" if prefix else key)
    return found


def _text(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return msgspec.json.encode(value).decode()
