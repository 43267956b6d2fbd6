"""The learner saves checkpoints, and reports the reason if the last one fails."""

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


def make_saver(world: World, checkpoints: Path, facts: dict[str, Any]) -> tuple[Saver, Counter[str]]:
    """Return a saver and the counters of its node. ``facts`` is the content of ``run.json``."""
    run = SimpleNamespace(checkpoints=checkpoints, read_run=lambda: facts)
    node: Any = SimpleNamespace(run=run, config=world.core.config, counters=Counter())
    return Saver(node, world.core), node.counters


def test_a_learner_with_a_successor_saves_nothing_more(world: World, tmp_path: Path) -> None:
    world.join(world.peer("simulator", "sim-0", robots=1))
    facts: dict[str, Any] = {"supervisor_pid": 7, "endpoints": {"learner": "tcp://10.0.0.1:5000"}}
    saver, _ = make_saver(world, tmp_path, facts)
    facts["endpoints"] = {"learner": "tcp://10.0.0.2:5000"}
    for attempt in (saver.check_successor, saver.finish):
        with pytest.raises(NodeError, match=r"the learner at tcp://10\.0\.0\.2:5000 continues this run"):
            attempt()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "facts",
    [{"supervisor_pid": None, "endpoints": {}}, {"supervisor_pid": 8, "endpoints": {"learner": "tcp://10.0.0.2:5000"}}],
)
def test_a_learner_saves_its_last_checkpoint_after_the_death_of_its_supervisor(
    world: World, tmp_path: Path, facts: dict[str, Any]
) -> None:
    """The run has no endpoints, or another supervisor has started, whose learner waits for this checkpoint."""
    world.join(world.peer("simulator", "sim-0", robots=1))
    found = {"supervisor_pid": 7, "endpoints": {"learner": "tcp://10.0.0.1:5000"}}
    saver, _ = make_saver(world, tmp_path, found)
    found.update(facts)
    saver.check_successor(at_once=True)
    saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000000000.safetensors"]


def test_the_error_for_the_last_checkpoint_has_the_number_of_its_cause(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is missing. With the number for a full disk, the user would get advice for a full disk."""
    world.join(world.peer("simulator", "sim-0", robots=1))
    saver, counters = make_saver(world, tmp_path / "missing", {})
    with pytest.raises(OSError, match="the last checkpoint could not be saved") as raised:
        saver.finish()
    assert raised.value.errno == errno.ENOENT
    assert counters == {"checkpoints_failed": 1}
    assert "checkpoint at 0 steps failed" in caplog.text
