"""A checkpoint is written atomically and has a hash. A run continues from the newest undamaged checkpoint."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.errors import BundleError
from td3_robot.learner.checkpointing import checkpoint

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], np.uint8)}


def test_a_saved_checkpoint_loads_unchanged_and_old_checkpoints_are_removed(tmp_path: Path) -> None:
    for steps in (1, 20, 300):
        checkpoint.save(tmp_path, steps, ARRAYS, {"steps": steps, "text": "ü"}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000000000020.safetensors",
        "checkpoint-000000000300.safetensors",
    ]
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    path, arrays, scalars = found
    assert path.name.endswith("300.safetensors")
    assert scalars == {"steps": 300, "text": "ü"}
    assert all(
        np.array_equal(arrays[name], ARRAYS[name]) and arrays[name].dtype == ARRAYS[name].dtype for name in ARRAYS
    )


def test_a_failed_write_keeps_the_previous_checkpoint_and_the_error_names_the_file(tmp_path: Path) -> None:
    """The system lets the process write only 1,000 bytes to a file. The second checkpoint is longer."""
    before = checkpoint.save(tmp_path, 1, ARRAYS, {}, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*checkpoint-000000000002\.safetensors") as raised:
            checkpoint.save(tmp_path, 2, {"a": np.zeros(1000)}, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == [before]


def test_an_older_checkpoint_is_loaded_if_the_newest_checkpoint_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, 1, ARRAYS, {"steps": 1}, keep=2)
    newest = checkpoint.save(tmp_path, 2, ARRAYS, {"steps": 2}, keep=2)
    whole = newest.read_bytes()
    damages = [whole[:-1], whole[:20], b"", whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:], b"x" * len(whole)]
    for damaged in damages:
        caplog.clear()
        newest.write_bytes(damaged)
        with pytest.raises(BundleError, match=r"checkpoint-000000000002\.safetensors"):
            checkpoint.load(newest)
        found = checkpoint.load_newest(tmp_path)
        assert found is not None
        assert found[2] == {"steps": 1}
        assert "the learner uses an older checkpoint" in caplog.text
        assert not newest.exists()  # load_newest renames it, so that it does not count as a checkpoint


def test_a_changed_bit_is_found_or_has_no_effect(tmp_path: Path) -> None:
    """For each byte of the file, the test flips one bit of this byte and leaves all other bytes unchanged.

    These bytes include the header, which holds the scalars, and the name, type and shape of each array.
    """
    path = checkpoint.save(tmp_path, 1, ARRAYS, {"updates": 2300, "text": "ü", "rate": 1e-3}, keep=1)
    whole = path.read_bytes()
    arrays, scalars = checkpoint.load(path)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            found, values = checkpoint.load(path)
        except BundleError:
            continue
        # An undetected change is in a part of the header that ``load`` ignores, for example in the key ``format``.
        assert values == scalars
        assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
            name: (array.dtype, array.tolist()) for name, array in arrays.items()
        }


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 8])
def test_the_configured_number_of_checkpoints_is_kept(keep: int, tmp_path: Path) -> None:
    for number in range(1, 13):
        checkpoint.save(tmp_path, number, ARRAYS, {}, keep=keep)
        steps = sorted(int(path.stem[-12:]) for path in tmp_path.iterdir())
        assert steps == list(range(max(1, number - keep + 1), number + 1))


def test_an_unreadable_checkpoint_is_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails for a moment, or the file has the format of another version."""
    for steps in (1, 2):
        checkpoint.save(tmp_path, steps, ARRAYS, {}, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", fails)
        with pytest.raises(OSError, match=r"Input/output error: '.*checkpoint-000000000002\.safetensors'"):
            checkpoint.load_newest(tmp_path)
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    with pytest.raises(BundleError, match=r"000000000002\.safetensors has format 3; this version reads format 4"):
        checkpoint.load_newest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, ARRAYS, {}, keep=2)
    for name in (
        ".checkpoint-000000000002.safetensors-2p5ue53b",
        ".tmpjvwgfl",
    ):  # temporary names of this package and of safetensors
        (tmp_path / name).write_bytes(b"half")
    checkpoint.tidy(tmp_path)
    assert list(tmp_path.iterdir()) == [saved]


def test_resuming_is_an_error_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    for steps in (1, 2):
        checkpoint.save(tmp_path, steps, ARRAYS, {}, keep=2).write_bytes(b"")
    for _ in range(2):  # the files keep their names, so the second attempt also finds them and raises the error
        with pytest.raises(BundleError, match=r"all checkpoints in .* are damaged: .*000000000002.*000000000001"):
            checkpoint.load_newest(tmp_path)


def test_the_checkpoint_just_saved_is_kept(tmp_path: Path) -> None:
    """A learner rolls back from step 300 and then saves at step 120. It keeps the file of step 120."""
    checkpoint.save(tmp_path, 300, ARRAYS, {}, keep=1)
    saved = checkpoint.save(tmp_path, 120, ARRAYS, {}, keep=1)
    assert list(tmp_path.iterdir()) == [saved]


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "missing") is None
