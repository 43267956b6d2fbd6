"""Atomic writes, the file of metrics, and the learning curve."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from td3_robot.runtime import learning_curve
from td3_robot.runtime.metrics import read
from td3_robot.util import files


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.write_atomically(path, b"one")
    files.write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    files.write_atomically(path, b"one")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o644)])
def test_the_umask_limits_the_permissions_of_a_written_file(umask: int, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = os.umask(umask)
    try:
        files.write_atomically(path, b"one")
        files.write_atomically(path, b"two")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_function_creating_removes_an_incomplete_file_and_refuses_an_existing_file(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"

    def interrupted() -> None:
        with files.creating(path):
            path.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not path.exists()
    with files.creating(path):
        path.write_bytes(b"whole")
    link.symlink_to("nothing")
    for old in (path, link):
        with pytest.raises(FileExistsError, match=old.name), files.creating(old):
            pass
    assert path.read_bytes() == b"whole"
    assert link.is_symlink()


def test_the_curve_skips_an_incomplete_line(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"kind": "train", "env_steps": 1000, "return_mean": 3.0},
        {"kind": "evaluation", "env_steps": 1000, "eval_return_mean": 4.0, "eval_return_std": 1.0},
    ]
    metrics.write_text("\n".join(json.dumps(row) for row in rows) + '\n{"kind": "tr')
    assert read(metrics, "train") == rows[:1]
    learning_curve.draw(metrics, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_damaged_lines_of_metrics_are_skipped(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    good = [{"kind": "evaluation", "env_steps": steps, "eval_return_mean": 1.0} for steps in (1000, 2000)]
    first, last = (json.dumps(record).encode() for record in good)
    damaged = [
        first.replace(b"0", b"\xff"),
        b"\0" * 100,
        b"12",
        b"[1]",
        b"[" * 100_000,
        b'{"kind": "evaluation"}',
        b'{"kind": "evaluation", "env_steps": "many"}',
        b'{"kind": ["evaluation"], "env_steps": 5000}',
    ]
    metrics.write_bytes(b"\n".join([first, *damaged, last]))
    assert read(metrics, "evaluation") == good


def test_a_repeated_record_of_offline_updates_replaces_the_earlier_record(tmp_path: Path) -> None:
    """A learner writes the record of 2000 updates. Then it resumes from 1500 updates, and writes this record again.

    All records have env_steps 0.
    """
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"kind": "offline", "env_steps": 0, "updates": updates} for updates in (1000, 2000, 2000, 3000)]
    metrics.write_text("\n".join(json.dumps(row) for row in rows))
    assert read(metrics, "offline") == [rows[0], *rows[2:]]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer. A device such as /dev/zero may have no end."""
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_bytes(b"12")
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match=rf"not a regular file: '{path}'$"):
            files.read(path, 2)
    with pytest.raises(IsADirectoryError, match=rf"Is a directory: '{tmp_path}'$"):
        files.read(tmp_path, 2)
    with pytest.raises(OSError, match=rf"more than 1 bytes: '{file}'$"):
        files.read(file, 1)
    assert files.read(file, 2) == b"12"


def test_only_files_are_replaced(tmp_path: Path) -> None:
    """A write by root must not replace a device such as /dev/full. The test uses a pipe, which any user can create."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    with pytest.raises(OSError, match=rf"is a device or a pipe, not a file: '{pipe}'$"):
        files.write_atomically(pipe, b"x")
    with pytest.raises(IsADirectoryError, match=rf"Is a directory: '{folder}'$"):
        files.write_atomically(folder, b"x")
    with pytest.raises(FileNotFoundError, match=rf"No such file or directory: '{tmp_path}/none/x'$"):
        files.write_atomically(tmp_path / "none" / "x", b"x")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "pipe"]
