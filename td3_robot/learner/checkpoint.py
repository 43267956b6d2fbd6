"""Checkpoints: one safetensors file each, with a JSON header and a hash; the newest whole one is used."""

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

from td3_robot import files
from td3_robot.bundle import read_metadata
from td3_robot.errors import BundleError

log = logging.getLogger(__name__)

FORMAT = 2
_MAX_HEADER = 1 << 26  # bytes
Arrays = dict[str, NDArray[Any]]


def save(folder: Path, env_steps: int, arrays: Arrays, scalars: Mapping[str, Any], keep: int) -> Path:
    """Write ``checkpoint-<env_steps>.safetensors`` atomically, then remove all but the newest ``keep``.

    Raises:
        OSError: the disk is full or the folder cannot be written; older checkpoints stay.
    """
    header = {"format": FORMAT, "sha256": _hash(arrays), "scalars": dict(scalars)}
    path = folder / f"checkpoint-{env_steps:012d}.safetensors"
    with files.replacing(path) as temporary:
        try:
            safetensors.numpy.save_file(arrays, temporary, metadata={"td3_robot": json.dumps(header)})
        except SafetensorError as error:  # a full disk is one of these, and says so in words alone
            found = re.search(r"os error (\d+)", str(error))
            if not found:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
    others = [other for other in sorted(folder.glob("checkpoint-*.safetensors")) if other != path]
    for old in others[: len(others) - (keep - 1)]:
        old.unlink()
    return path


def load_newest(folder: Path) -> tuple[Path, Arrays, dict[str, Any]] | None:
    """The newest checkpoint that is whole; None if there is none at all.

    Damaged ones are passed over with a message, and put aside as ``*.damaged``, so that they do not count as newest.

    Raises:
        BundleError: there are some, and none is whole.
    """
    damaged: list[str] = []
    for path in sorted(folder.glob("checkpoint-*.safetensors"), reverse=True):
        try:
            arrays, scalars = load(path)
        except BundleError as error:
            log.warning("%s; the one before it is used", error)
            damaged.append(str(error))
            path.rename(path.with_name(f"{path.name}.damaged"))
            continue
        return path, arrays, scalars
    if damaged:
        raise BundleError(f"no whole checkpoint is left in {str(folder)!r}: {'; '.join(damaged)}")
    return None


def load(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and scalars of one file.

    Raises:
        BundleError: unreadable, truncated, of another format, or its content does not have the hash it names.
    """
    try:
        with path.open("rb") as file:
            size = file.read(8)
            head = size + file.read(min(int.from_bytes(size, "little"), _MAX_HEADER))
        header = read_metadata(head, f"checkpoint {path.name}")
        arrays: Arrays = safetensors.numpy.load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise BundleError(f"checkpoint {path.name} is damaged: {error}") from None
    if header.get("format") != FORMAT or not isinstance(header.get("scalars"), dict):
        raise BundleError(f"checkpoint {path.name} has format {header.get('format')!r}; this version reads {FORMAT}")
    if header.get("sha256") != _hash(arrays):
        raise BundleError(f"checkpoint {path.name} is damaged: its content does not have the hash it names")
    return arrays, header["scalars"]


def _hash(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
