"""Computes how much memory, disk and GPU memory a learner needs, and refuses a run that does not fit."""

from __future__ import annotations

import bisect
from itertools import pairwise
from typing import NamedTuple

from td3_robot.config.learner import LearnerConfig
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError
from td3_robot.learner.algorithms.table import CONSUMES
from td3_robot.learner.replay_buffer.storage import ROWS, row_size
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import files, machine

BRANCHES, ROOTS = 32, 1024
"""In the sum tree of prioritised replay: the children of each node, and the maximum number of nodes on the top level.

These numbers were the fastest for a million leaves.
"""
_DEMONSTRATIONS = 100_000
_FLOAT, _DOUBLE, _HALF = 4, 8, 2  # bytes


class Needs(NamedTuple):
    """Bytes that a learner needs. They do not include its program and libraries."""

    kept: int  # memory that the learner needs all the time
    memory: int  # peak memory, while the learner loads a checkpoint
    replay_file: int  # disk space of the replay file
    checkpoints: int  # disk space of all checkpoints that exist at one time
    device: int  # GPU memory; 0 without a GPU


class Networks(NamedTuple):
    """The sizes of an algorithm's networks."""

    parameters: int  # of all networks, including copies such as target networks
    trained: int  # parameters that an optimiser changes
    replays: bool  # whether the algorithm learns from a replay buffer


def estimated(config: Config, observation_size: int, action_size: int) -> Networks:
    """Estimate the sizes of a built-in algorithm's networks, without importing torch.

    The estimate counts an actor, one or two critics, and a target of each network. An algorithm needs less if it has
    no targets, or if it has one critic although ``twin_critics`` is set.
    """
    learner, hidden = config.learner, config.network.hidden

    def count(inputs: int, outputs: int) -> int:
        return sum(before * after + after for before, after in pairwise((inputs, *hidden, outputs)))

    actor = count(observation_size, action_size)
    critic = count(observation_size + action_size, 1) + (2 * sum(hidden) if learner.layer_norm else 0)
    trained = actor + (1 + learner.twin_critics) * critic
    average = actor if learner.policy_average else 0
    return Networks(2 * trained + average, trained, CONSUMES.get(learner.algorithm) != "rollouts")


def needs(
    config: Config,
    observation_size: int,
    action_size: int,
    networks: Networks | None = None,
    capacity: int | None = None,
) -> Needs:
    """What a learner with this configuration needs. In a short run, checkpoints hold fewer rows than ``capacity``.

    Args:
        config: without ``auto`` in ``device`` and ``precision``.
        networks: sizes of the algorithm's networks; None to use :func:`estimated`.
        capacity: size of the replay buffer, in transitions; None to use ``learner.buffer_size``.
    """
    learner, on_gpu = config.learner, config.learner.device == "cuda"
    networks = networks or estimated(config, observation_size, action_size)
    capacity = capacity or learner.buffer_size if networks.replays else 0
    filled = capacity if learner.recordings else min(capacity, config.total_steps + config.robots * config.simulators)
    row = _FLOAT * row_size(observation_size, action_size)
    apart = row * demonstrations(learner) if learner.operator_share else 0
    lap, in_file = learner.replay == "lap", learner.replay_storage == "file"
    tree = _DOUBLE * sum(tree_levels(capacity)) if lap else 0
    # In lock-step, a rollback needs the rows as they were when the checkpoint was saved. Since then, newer rows can
    # have replaced these rows in the file. So the checkpoint contains the rows, too.
    rows_in_checkpoint = not in_file or config.timing == "lockstep"
    low_precision = _HALF * networks.parameters if learner.precision == "bf16" else 0
    # Each trained parameter also has a gradient and Adam's two moments. A checkpoint contains no gradient.
    arrays = _FLOAT * (networks.parameters + 3 * networks.trained) + low_precision
    saved = _FLOAT * (networks.parameters + 2 * networks.trained) + apart
    saved += (_DOUBLE * filled if lap else 0) + (row * filled if rows_in_checkpoint else 0)
    kept = (0 if in_file else row * capacity) + apart + tree + (0 if on_gpu else arrays)
    return Needs(
        kept,
        kept + saved,
        row * capacity if in_file else 0,
        saved * (config.checkpoint.keep + 1 if _saves_often(config) else 1),
        row * (capacity + min(learner.batch_size, capacity)) + apart + arrays if on_gpu else 0,
    )


def demonstrations(learner: LearnerConfig) -> int:
    """The capacity of the separate buffer for an operator's transitions, see ``learner.operator_share``."""
    return min(learner.buffer_size, _DEMONSTRATIONS)


def announce(
    config: Config,
    observation_size: int,
    action_size: int,
    run: RunFolder,
    device_memory: int | None = None,
    loaded: int = 0,
    networks: Networks | None = None,
) -> str:
    """One line with the memory and disk space that the learner needs, and how much is free.

    Args:
        config, networks: see :func:`needs`.
        run: the run folder, which may not exist yet. An existing replay file needs no further space. If
            the learner saves during the run, new checkpoints take the space of the existing ones.
        device_memory: free bytes of the GPU; None if unknown or without a GPU.
        loaded: bytes of a checkpoint that is already in memory.

    Raises:
        ConfigError: not enough memory or disk space is free.
    """
    networks = networks or estimated(config, observation_size, action_size)
    held = config.learner.buffer_size
    in_file = files.allocated(run.replay / ROWS)
    # If the learner saves only when it ends, it saves the new checkpoint before it deletes earlier checkpoints. So the
    # new checkpoint cannot use the space of the earlier checkpoints.
    saved = run.checkpoints.glob("*.safetensors") if _saves_often(config) else ()
    in_checkpoints = sum(map(files.allocated, saved))

    def needed(capacity: int) -> tuple[int, int, int]:
        need = needs(config, observation_size, action_size, networks, capacity)
        disk = max(0, need.replay_file - in_file) + max(0, need.checkpoints - in_checkpoints)
        return max(0, need.memory - loaded), disk, need.device

    def largest(index: int, free: int) -> int:
        return bisect.bisect_right(range(1, held), free, key=lambda capacity: needed(capacity)[index])

    places = (
        ("memory", machine.available_memory()),
        (f"the disk of {str(run.path)!r}", files.free(run.path)),
        ("the GPU's memory", device_memory),
    )
    parts: list[str] = []
    for index, (place, free) in enumerate(places):
        need = needed(held)[index]
        if free is not None and need > free:
            lack = f"the learner needs {need:,} bytes of {place}, and {free:,} are free"
            if not networks.replays:
                raise ConfigError(lack)
            most = largest(index, free)
            fit = f"allowed: a buffer of at most {most}" if most else "no transition would fit: free some space"
            raise ConfigError(f"learner.buffer_size is {held}: {lack}; {fit}")
        if need:
            there = "free space unknown" if free is None else f"{_readable(free)} free"
            parts.append(f"{_readable(need)} of {place} ({there})")
    kept = _readable(needs(config, observation_size, action_size, networks).kept)
    what = f"networks and a replay buffer of {held:,} transitions" if networks.replays else "networks"
    return f"{what}: {kept} of memory; with checkpoints: {', '.join(parts)}"


def tree_levels(capacity: int) -> list[int]:
    """The number of nodes on each level of a sum tree with ``capacity`` leaves, from the top to the leaves."""
    levels = [_padded(capacity)]
    while levels[0] > ROOTS:
        levels.insert(0, _padded(levels[0] // BRANCHES))
    return levels


def _padded(count: int) -> int:
    return -(-count // BRANCHES) * BRANCHES


def _saves_often(config: Config) -> bool:
    """Whether the learner also saves checkpoints before the end of the run."""
    return bool(config.checkpoint.every) or config.timing == "lockstep"


def _readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
