"""The benchmark benchmarks/scale.py: its simulation of the learner's queue, and its tables in the documents."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
queues: Any = importlib.import_module("scale_queues")


def test_few_sources_are_served_one_step_at_a_time() -> None:
    """One source sends 50 Steps per second, and each Step takes 1 ms. So the thread is busy for 5 % of the time."""
    outcome = queues.simulate(1, 1, 50.0, queues.Costs(0.0008, 0.0, 0.0002, 0.0))
    assert outcome.turns_per_step == 1
    assert outcome.busy == pytest.approx(0.05, rel=0.01)
    assert outcome.steps_per_s == pytest.approx(50, rel=0.01)
    assert outcome.delay_ms == pytest.approx(1.0)


def test_a_busy_thread_processes_only_as_many_steps_as_the_costs_allow() -> None:
    """100 sources send 6,000 Steps per second, and each Step takes 1 ms. The thread processes 1,000 per second.

    So after 2 s, 2 · (6,000 - 1,000) Steps wait.
    """
    outcome = queues.simulate(100, 1, 60.0, queues.Costs(0.0, 0.0, 0.001, 0.0), seconds=2.0)
    assert outcome.busy > 0.99
    assert outcome.steps_per_s == pytest.approx(1000, rel=0.01)
    assert outcome.waiting == pytest.approx(10_000, rel=0.02)


def test_waiting_steps_share_the_cost_of_a_turn() -> None:
    """A turn costs 2 ms, and a Step costs 0.1 ms. 40 sources send 2,400 Steps per second.

    With one turn for each Step, a Step would take 2.1 ms, and the thread could process only 476 per second.
    """
    outcome = queues.simulate(40, 1, 60.0, queues.Costs(0.002, 0.0, 0.0001, 0.0))
    assert outcome.turns_per_step < 0.3
    assert outcome.steps_per_s == pytest.approx(2400, rel=0.01)


def test_a_thread_with_half_a_processor_core_makes_fewer_turns() -> None:
    costs = queues.Costs(0.0004, 0.0, 0.0001, 0.0)
    alone, shared = (queues.simulate(16, 1, 60.0, costs, share=share) for share in (1.0, 0.5))
    assert shared.turns_per_step < alone.turns_per_step
    assert shared.delay_ms > alone.delay_ms
    assert shared.steps_per_s == pytest.approx(16 * 60, rel=0.02)


def test_the_largest_number_of_sources_follows_from_the_costs() -> None:
    """A Step takes 1 ms, so the thread can process 1,000 Steps per second. That is 1,000 / 60 = 16.7 sources."""
    assert queues.most_sources(1, 60.0, queues.Costs(0.0, 0.0, 0.001, 0.0)) in (16, 17)


def test_the_fit_recovers_the_costs() -> None:
    costs = queues.Costs(200e-6, 3e-6, 80e-6, 0.5e-6)
    cells = [
        {
            "sources": sources,
            "robots": robots,
            "turns_per_step": turns,
            "main_us": costs.of_turn(sources, robots, 1) * 1e6
            - (1 - turns) * (costs.turn + costs.turn_source * sources) * 1e6,
        }
        for sources in (1, 2, 4)
        for robots in (1, 16)
        for turns in (1.0, 0.2)
    ]
    assert queues.fit(cells) == pytest.approx(costs)


def test_the_page_about_scale_shows_the_measured_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import scale_page

    copy = tmp_path / "scale.md"
    shutil.copy(scale_page.PAGE, copy)
    monkeypatch.setattr(scale_page, "PAGE", copy)
    monkeypatch.setattr(scale_page, "draw", lambda _: None)
    scale_page.write(json.loads(scale_page.DATA.read_text()))
    assert copy.read_text() == (ROOT / "docs" / "explanation" / "scale.md").read_text()


@pytest.mark.parametrize("other", [{"rounds": 3}, {"seconds": 1.5}, {"machine": {"processor": "another", "cores": 1}}])
def test_parts_that_were_measured_differently_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: dict[str, Any]
) -> None:
    """The page scale.md names the rounds, the seconds and the processor once, for all parts of the benchmark."""
    scale = importlib.import_module("scale")
    monkeypatch.setattr(scale, "_Bench", lambda *_: SimpleNamespace(costs=lambda: "new"))
    file = tmp_path / "scale.json"
    old = {"machine": scale.harness.describe(), "rounds": 2, "seconds": 2.0, "costs": "old", "ray": "old"}
    monkeypatch.setattr(sys, "argv", ["scale.py", "--only", "costs", "--rounds", "2", "--out", str(file), "--json"])
    file.write_text(json.dumps(old | other))
    with pytest.raises(SystemExit) as end:
        scale.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "was measured with --rounds " in error
    assert error.count("\n") == 1
    assert json.loads(file.read_text()) == old | other

    file.write_text(json.dumps(old))
    assert scale.main() == 0
    kept = json.loads(file.read_text())
    assert (kept["costs"], kept["ray"]) == ("new", "old")
