"""Checkpoint files: safetensors with a JSON header and a hash. A run continues from the newest undamaged checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from td3_robot.bundle import MAX_HEADER, read_metadata
from td3_robot.errors import BundleError
from td3_robot.util import files

log = logging.getLogger(__name__)

FORMAT = 3
Arrays = dict[str, NDArray[Any]]


class DamagedError(BundleError):
    """A checkpoint file is incomplete, or its content has changed since it was written."""


def save(folder: Path, env_steps: int, arrays: Arrays, scalars: Mapping[str, Any], keep: int) -> Path:
    """Write ``checkpoint-<env_steps>.safetensors`` atomically, then remove old checkpoints until ``keep`` remain.

    Raises:
        OSError: the disk is full or the folder cannot be written; older checkpoints stay.
    """
    text = json.dumps(dict(scalars))
    header = {"format": FORMAT, "sha256": _hash(arrays, text), "scalars": text}
    path = folder / f"checkpoint-{env_steps:012d}.safetensors"
    with files.replacing(path) as temporary:
        try:
            safetensors.numpy.save_file(arrays, temporary, metadata={"td3_robot": json.dumps(header)})
        except SafetensorError as error:  # the system's error number is only in the text
            found = re.search(r"os error (\d+)", str(error))
            if not found:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
    others = [other for other in sorted(folder.glob("checkpoint-*.safetensors")) if other != path]
    for old in others[: max(0, len(others) - (keep - 1))]:
        old.unlink()
    return path


def load_newest(folder: Path) -> tuple[Path, Arrays, dict[str, Any]] | None:
    """Load the newest undamaged checkpoint. Rename newer, damaged checkpoints to ``*.damaged``.

    Returns:
        Path, arrays and scalars; None if there are no checkpoints.

    Raises:
        BundleError: all checkpoints are damaged, or the newest undamaged checkpoint has another format.
        OSError: a file cannot be read.
    """
    damaged: dict[Path, str] = {}  # texts, because an error object would keep the arrays of its file in memory
    for path in sorted(folder.glob("checkpoint-*.safetensors"), reverse=True):
        try:
            arrays, scalars = load(path)
        except DamagedError as error:
            damaged[path] = str(error)
            continue
        for newer, problem in damaged.items():
            log.warning("%s; the learner uses an older checkpoint", problem)
            newer.rename(newer.with_name(f"{newer.name}.damaged"))
        return path, arrays, scalars
    if damaged:  # these files keep their names: otherwise the next learner would begin without a checkpoint
        raise BundleError(f"all checkpoints in {str(folder)!r} are damaged: {'; '.join(damaged.values())}")
    return None


def load(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and scalars of one file.

    Raises:
        DamagedError: the file is missing or truncated, or its hash does not match its content.
        BundleError: the file has another format.
        OSError: the file cannot be read.
    """
    what = f"checkpoint {path.name}"
    try:
        header = _header(path, what)
        with files.naming(path):
            arrays: Arrays = safetensors.numpy.load_file(path)
    except (BundleError, SafetensorError, ValueError, IsADirectoryError, FileNotFoundError) as error:
        raise DamagedError(f"{what} is damaged: {error}") from None
    text, found = header.get("scalars"), header.get("format")
    if isinstance(text, str) and header.get("sha256") == _hash(arrays, text):
        return arrays, json.loads(text)
    if found != FORMAT:  # this version cannot check another format for damage
        raise BundleError(f"{what} has format {found!r}; this version reads format {FORMAT}")
    raise DamagedError(f"{what} is damaged: the hash in its header is not the hash of its content")


def is_checkpoint(path: Path) -> bool:
    """Whether the header of this file is that of a checkpoint; False if the header cannot be read."""
    try:
        return "scalars" in _header(path, path.name)
    except (BundleError, OSError):
        return False


def of_another_program(path: Path) -> bool:
    """Whether the on-policy program of version 0.1.0 wrote this checkpoint; False if the file is damaged."""
    try:
        return "parts" not in json.loads(_header(path, path.name)["scalars"])
    except (BundleError, KeyError, TypeError, ValueError):  # the file is damaged
        return False


def tidy(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed while saving."""
    for pattern in (".checkpoint-*", ".tmp*"):  # unfinished files of this module, and of safetensors
        for left in folder.glob(pattern):
            log.info("removing %s, which another process left unfinished", left.name)
            left.unlink(missing_ok=True)


def _header(path: Path, what: str) -> dict[str, Any]:
    with files.naming(path), files.open_regular(path) as file:
        size = file.read(8)
        head = size + file.read(min(int.from_bytes(size, "little"), MAX_HEADER))
    return read_metadata(head, what)


def _hash(arrays: Arrays, text: str) -> str:
    """The hash of FORMAT, of the scalars as JSON text, and of the arrays' names, types, shapes and numbers."""
    digest = hashlib.sha256(f"{FORMAT} {text}".encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f" {name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.data)
    return digest.hexdigest()
