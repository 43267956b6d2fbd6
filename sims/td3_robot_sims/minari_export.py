"""Exports a recording as a Minari dataset: HDF5 data for offline reinforcement learning.

See https://minari.farama.org. Minari 0.4 and later versions can read the dataset.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import h5py  # noqa: F401 - if h5py is missing, the error of this import is clearer than minari's later error
import minari
import numpy as np
from gymnasium import error, spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.envs.registration import spec as registered
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from numpy.typing import NDArray

from td3_robot.errors import ConfigError, SessionError, UsageError
from td3_robot.messages import Hello, Phase, Step
from td3_robot.recording import experience
from td3_robot.recording.episodes import Episode, Episodes
from td3_robot.recording.reader import Session
from td3_robot.specs import Channel, RobotSpec
from td3_robot.util import files
from td3_robot_sims import tasks

_BATCH = 100  # episodes per call of Minari
_EPISODE_BYTES = 65536  # limit for what HDF5 adds to the data of an episode; usual are 30,000 to 43,000 bytes
_TEMPORARY = ".td3-robot-"
_NAME = re.compile(r"([-_\w]{2,}/)*[-_\w]+-v[0-9]+", re.ASCII)


def name_of(path: Path) -> str:
    """Return the default name of a recording's dataset: ``session-v0`` for ``session.mcap``."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', path.stem)}-v0"


def check_name(name: str) -> None:
    """Check the name of a dataset. Raises UsageError if Minari does not accept it."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--dataset is {name!r}; allowed: NAME-vN or FOLDER/NAME-vN, with letters, digits, '_', '-'; "
            "FOLDER has at least two characters"
        )


def export(session: Session, root: Path, name: str) -> Counter[str]:
    """Write or replace the dataset ``root/name``; ``root`` is Minari's MINARI_DATASETS_PATH.

    A missing Step splits an episode into two parts. The metadata ``begun`` and ``end`` of the parts show this. The
    first part ends with a truncation, because the robot did not fail. Minari's own collector also truncates an
    episode that has no end.

    Returns:
        The numbers of episodes, of whole episodes (with beginning and end) and of steps, and the counts of
        :meth:`~td3_robot.recording.episodes.Episodes.lost`.

    Raises:
        SessionError: the recording is damaged, holds two kinds of robots, or holds no pair of consecutive Steps.
        OSError: the dataset cannot be written.
    """
    root = root.resolve()  # Minari prepends a relative root to its paths twice
    target = root / name
    spec = experience.spec_of(session)
    cutter, counts = Episodes(), Counter[str]()

    def cut() -> Iterator[Episode]:
        for _, step in session.messages_of(Step):
            yield from cutter.add(step)
        yield from cutter.finish()

    episodes = cut()
    batch = list(islice(episodes, _BATCH))
    if not batch:
        raise SessionError(f"{session.decode.label} holds no pair of consecutive Steps, so it has no episode to export")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        files.naming(target, instead_of=_TEMPORARY),
        tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=root) as folder,  # renamed when complete
    ):
        unfinished = Path(folder) / "dataset"
        unfinished.mkdir()
        boxes = {"observation_space": _box(spec.observations), "action_space": _box(spec.actions)}
        storage = MinariStorage.new(unfinished / "data", **boxes, env_spec=_environment(session))
        while batch:
            _require_space(root, batch)
            _add(storage, batch, counts)
            batch = list(islice(episodes, _BATCH))
        counts += cutter.lost()
        storage.update_metadata(
            {
                "dataset_id": name,
                "minari_version": minari.__version__,
                "description": f"{spec.name}, recorded by td3-robot; {summary(counts)}.",
                "td3_robot": _facts(session, spec, counts),
            }
        )
        if target.is_dir():
            shutil.rmtree(target)
        unfinished.rename(target)
    return counts


def summary(counts: Counter[str]) -> str:
    """Return the counts of :func:`export` as text."""
    cut = counts["episodes"] - counts["whole"]
    losses = (
        (cut, f"{cut} episodes without their beginning or end"),
        (counts["missed"], f"{counts['missed']} Steps missing in {counts['gaps']} places"),
        (counts["late"], f"{counts['late']} Steps came too late"),
        (counts["alone"], f"{counts['alone']} observations that belong to no episode"),
    )
    whole = f"{counts['episodes']} episodes, {counts['steps']} steps"
    return "; ".join([whole, *(text for count, text in losses if count)])


def _add(storage: MinariStorage, episodes: Sequence[Episode], counts: Counter[str]) -> None:
    first = storage.total_episodes
    storage.update_episodes([EpisodeBuffer(**_columns(episode)) for episode in episodes])
    storage.update_episode_metadata(map(_about, episodes), range(first, first + len(episodes)))
    counts["episodes"] += len(episodes)
    counts["whole"] += sum(episode.whole for episode in episodes)
    counts["steps"] += sum(len(episode.steps) - 1 for episode in episodes)


def _require_space(folder: Path, episodes: Sequence[Episode]) -> None:
    """Raise OSError if the disk has no space for the episodes. When HDF5 cannot write, it crashes the process."""
    needed = 0
    for episode in episodes:
        arrays: list[NDArray[Any]] = [episode.observation, episode.action, episode.reward, *episode.identity.values()]
        needed += _EPISODE_BYTES + 2 * sum(array.nbytes for array in arrays)  # HDF5 fills the last block of each array
    free = files.free(folder)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _columns(episode: Episode) -> dict[str, Any]:
    """Return the arguments of Minari's EpisodeBuffer.

    For an episode of T steps, these are T + 1 observations and infos, and T rows in all other arrays.
    """
    terminated = np.zeros(len(episode.steps) - 1, bool)
    truncated = terminated.copy()
    (terminated if episode.end == Phase.TERMINATED else truncated)[-1] = True
    return {
        "observations": episode.observation,
        "actions": episode.action,
        "rewards": episode.reward,
        "terminations": terminated,
        "truncations": truncated,
        "infos": episode.identity,
    }


def _about(episode: Episode) -> dict[str, Any]:
    """Return the metadata of an episode. Minari turns names with a slash into maps."""
    return {
        "source": episode.source,
        "incarnation": episode.incarnation,
        "robot": episode.robot,
        "number": episode.number,
        "begun": episode.begun,
        "end": "missing" if episode.end is None else episode.end.name.lower(),
        **{f"world/{name}": value for name, value in episode.world.items()},
    }


def _facts(session: Session, spec: RobotSpec, counts: Counter[str]) -> dict[str, Any]:
    """Return the metadata that this module adds to the metadata of Minari."""
    facts = {key: session.metadata.get(key, "") for key in ("td3-robot", "protocol", "task")}
    with contextlib.suppress(SessionError):  # a recording without its configuration
        facts["seed"] = str(session.config().seed)
    return {**facts, "robot": spec.describe(), "counts": dict(counts)}


def _box(channels: Sequence[Channel]) -> spaces.Box:
    low, high = np.array([(channel.low, channel.high) for channel in channels], np.float32).T
    return spaces.Box(low, high, dtype=np.float32)


def _environment(session: Session) -> EnvSpec | None:
    """Return the simulated environment if Gymnasium knows it; None for a real robot."""
    roles = {hello.role for _, hello in session.messages_of(Hello)}
    task = session.metadata.get("task", "")
    if "driver" in roles or "simulator" not in roles:
        return None
    try:
        backend, name = tasks.find(task)
        identity = backend.gymnasium_id(name)
        return registered(identity) if identity else None
    except (error.Error, ConfigError, ImportError):  # not registered, or not installed on this machine
        return None
