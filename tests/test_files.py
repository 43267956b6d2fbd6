"""Atomic writing, and the learning curve's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from td3_robot import curve, files


def test_replaces_whole(tmp_path: Path) -> None:
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


def test_curve_reads_what_a_crash_left(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"kind": "train", "env_steps": 1000, "return_mean": 3.0},
        {"kind": "evaluation", "env_steps": 1000, "eval_return_mean": 4.0, "eval_return_std": 1.0},
    ]
    metrics.write_text("\n".join(json.dumps(row) for row in rows) + '\n{"kind": "tr')
    assert curve.read(metrics, "train") == rows[:1]
    curve.draw(metrics, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
