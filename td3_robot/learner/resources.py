"""What a learner needs of memory, disk and GPU; a run that cannot fit is refused before it starts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError
from td3_robot.learner.replay_buffer.storage import ROWS, row_size
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import files, machine

BRANCHES = 32
"""Children of a node in the sum tree of prioritised replay; of 4 to 128, the fastest for a million leaves."""
_FLOAT, _DOUBLE, _HALF = 4, 8, 2  # bytes


class Needs(NamedTuple):
    """Bytes that a learner needs, besides its program and libraries.

    Attributes:
        kept: memory at all times.
        memory: peak memory, while a checkpoint is read beside the buffer that it fills.
        replay_file: disk.
        checkpoints: disk, for all checkpoints at one time.
        device: GPU memory; 0 without a GPU.
    """

    kept: int
    memory: int
    replay_file: int
    checkpoints: int
    device: int


def needs(config: Config, observation_size: int, action_size: int) -> Needs:
    """What a learner with this configuration needs.

    A checkpoint counts the rows that the run can fill, which are fewer than the buffer's if the run is short.

    Args:
        config: without ``auto`` in ``device`` and ``precision``.
    """
    learner, on_gpu = config.learner, config.learner.device == "cuda"
    capacity = 0 if learner.on_policy else learner.buffer_size
    filled = capacity if learner.recordings else min(capacity, config.total_steps + config.robots * config.simulators)
    row = _FLOAT * row_size(observation_size, action_size)
    lap = learner.replay == "lap"
    tree = _DOUBLE * sum(tree_levels(capacity)) if lap else 0
    in_file = learner.replay_storage == "file"
    kept_there = (
        in_file and config.timing != "lockstep"
    )  # in lock-step the file is ahead of the snapshots, so they hold the rows
    actor, critics = _parameters(config, observation_size, action_size)
    average = actor if learner.policy_average else 0
    parameters = 2 * (actor + critics) + average  # online, target, and average
    networks = _FLOAT * (parameters + 3 * (actor + critics))  # with the gradient and Adam's two moments
    if learner.precision == "bf16":
        networks += _HALF * parameters
    saved_networks = _FLOAT * (4 * (actor + critics) + average)
    saved = saved_networks + (_DOUBLE * filled if lap else 0) + (0 if kept_there else row * filled)
    at_a_time = config.checkpoint.keep + 1 if _saves_often(config) else 1
    kept = (0 if in_file else row * capacity) + tree + (0 if on_gpu else networks)
    return Needs(
        kept,
        kept + saved,
        row * capacity if in_file else 0,
        at_a_time * saved,
        row * (capacity + learner.batch_size) + networks if on_gpu else 0,
    )


def announce(
    config: Config,
    observation_size: int,
    action_size: int,
    run: RunFolder,
    device_memory: int | None = None,
    loaded: int = 0,
) -> str:
    """One line with what the learner needs and what is free.

    Args:
        config: without ``auto`` in ``device`` and ``precision``.
        run: its folder need not exist; what it holds already is not needed again.
        device_memory: free bytes of the GPU; None if unknown or without a GPU.
        loaded: bytes of a checkpoint that is already in memory.

    Raises:
        ConfigError: it does not fit.
    """

    def needed(capacity: int) -> tuple[int, int, int]:
        need = needs(replace(config, learner=replace(config.learner, **_of_size(config, capacity))), *sizes)
        disk = max(0, need.replay_file - in_file) + max(0, need.checkpoints - in_checkpoints)
        return need.memory - loaded, disk, need.device

    sizes = observation_size, action_size
    in_file = files.allocated(run.replay / ROWS)
    # A start that saves only at its end keeps the checkpoints of earlier starts.
    saved = run.checkpoints.glob("*.safetensors") if _saves_often(config) else ()
    in_checkpoints = sum(map(files.allocated, saved))
    held = config.learner.buffer_size
    places = (
        ("memory", machine.available_memory()),
        (f"the disk of {str(run.path)!r}", files.free(run.path)),
        ("the GPU's memory", device_memory),
    )
    parts: list[str] = []
    for index, (place, free) in enumerate(places):
        need = needed(held)[index]
        if free is not None and need > free:
            most = _largest(held, lambda capacity, index=index, free=free: needed(capacity)[index] <= free)  # type: ignore[misc]
            fit = f"at most {most} would fit" if most else "not one transition would fit: make room there"
            raise ConfigError(
                f"learner.buffer_size is {held}: the learner needs {need:,} bytes of {place}, "
                f"and {free:,} are free; {fit}"
            )
        if need:
            there = "what is free cannot be told" if free is None else f"{_readable(free)} free"
            parts.append(f"{_readable(need)} of {place} ({there})")
    kept = _readable(needs(config, *sizes).kept)
    what = "networks" if config.learner.on_policy else f"replay buffer of {held:,} transitions and networks"
    return f"{what}: {kept} of memory; with a checkpoint {', '.join(parts)}"


def tree_levels(capacity: int) -> list[int]:
    """The number of nodes on each level of a sum tree with ``capacity`` leaves, from the top to the leaves."""
    levels = [_padded(capacity)]
    while levels[0] > BRANCHES:
        levels.insert(0, _padded(levels[0] // BRANCHES))
    return levels


def _padded(count: int) -> int:
    return -(-count // BRANCHES) * BRANCHES


def _parameters(config: Config, observation_size: int, action_size: int) -> tuple[int, int]:
    """The numbers of parameters of the actor, and of all critics."""

    def count(inputs: int, outputs: int, layer_norm: bool) -> int:
        linear = sum(before * after + after for before, after in pairwise((inputs, *config.network.hidden, outputs)))
        return linear + (2 * sum(config.network.hidden) if layer_norm else 0)

    learner = config.learner
    critic = count(observation_size + action_size, 1, learner.layer_norm)
    return count(observation_size, action_size, False), (1 + learner.twin_critics) * critic


def _saves_often(config: Config) -> bool:
    """Whether checkpoints are also saved before the end, so that ``checkpoint.keep`` of them exist."""
    return bool(config.checkpoint.every) or config.timing == "lockstep"


def _of_size(config: Config, capacity: int) -> dict[str, int]:
    return {"buffer_size": capacity, "batch_size": min(config.learner.batch_size, capacity)}


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to below ``limit`` that fits; 0 if none fits."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
