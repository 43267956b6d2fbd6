"""The learner saves checkpoints, and reports the reason if the last checkpoint fails."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from td3_robot.errors import NodeError
from td3_robot.learner.checkpointing.saver import Saver
from tests.learner.world import World


def make_saver(world: World, folder: Path) -> tuple[Saver, Counter[str]]:
    """Return a saver that saves checkpoints in ``folder/checkpoint``, and the counters of its node."""
    run = SimpleNamespace(checkpoints=folder / "checkpoint", learner_file=folder / ".learner")
    node: Any = SimpleNamespace(run=run, config=world.core.config, counters=Counter())
    return Saver(node, world.core), node.counters


def test_a_learner_with_a_successor_saves_nothing_more(world: World, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    world.join(world.peer("simulator", "sim-0", robots=1))
    earlier, _ = make_saver(world, tmp_path)
    later, _ = make_saver(world, tmp_path)
    for attempt in (earlier.check_successor, earlier.finish):
        with pytest.raises(NodeError, match="another learner continues this run; this learner saves nothing more"):
            attempt()
    assert not list((tmp_path / "checkpoint").iterdir())
    later.check_successor()
    later.finish()
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["checkpoint-000000000000.safetensors"]


def test_a_learner_that_could_not_mark_its_run_folder_still_saves(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A learner marks its run folder with a random text. A later learner replaces this text.

    Here the disk is full, so the folder keeps the text of an earlier learner.
    """
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / ".learner").write_text("an earlier learner")
    world.join(world.peer("simulator", "sim-0", robots=1))

    def full(path: Path, content: bytes) -> None:
        del content
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("td3_robot.learner.checkpointing.saver.files.write_atomically", full)
    saver, _ = make_saver(world, tmp_path)
    monkeypatch.undo()
    saver.finish()
    assert list((tmp_path / "checkpoint").iterdir())
    assert "No space left on device; this learner cannot notice if another learner continues the run" in caplog.text


def test_the_error_for_the_last_checkpoint_has_the_errno_of_its_cause(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the errno ENOSPC, users get advice for a full disk. Here the folder is missing, so the errno is ENOENT."""
    world.join(world.peer("simulator", "sim-0", robots=1))
    saver, counters = make_saver(world, tmp_path)
    with pytest.raises(OSError, match="the last checkpoint could not be saved") as raised:
        saver.finish()
    assert raised.value.errno == errno.ENOENT
    assert counters == {"checkpoints_failed": 1}
    assert "checkpoint at 0 steps failed" in caplog.text
