"""The progress of a training and of other long work, on a terminal and in a file."""

from __future__ import annotations

import io
import re
import threading
import time
from typing import Any

import pytest

from td3_robot.messages import Status
from td3_robot.runtime.progress import Progress, Working, duration, line
from tests.conftest import Terminal

FIGURES = {
    "env_steps": 25_000.0,
    "updates": 15_000.0,
    "steps_per_s": 150.0,
    "updates_per_s": 148.7,
    "replay_ratio": 0.996,
    "return_mean": 612.4,
    "staleness_updates": 5.6,
}


def status(**changes: float) -> dict[str, Status]:
    return {"learner": Status("learner", "ready", "", {**FIGURES, **changes}, {})}


def test_progress_line_shows_the_figures() -> None:
    """75,000 steps are left. At 150 steps/s they take 500 s, which is 8 min 20 s."""
    assert line(FIGURES, 100_000) == (
        "25,000/100,000 steps (25 %) | ETA 8:20 | 150 steps/s | 149 updates/s | ratio 1.00 | return 612 | "
        "stale 6 updates"
    )
    assert line({}, 100).startswith("0/100 steps (0 %) | ETA - | 0 steps/s")
    assert "return - |" in line({}, 100)


def test_durations_are_printed_in_hours_minutes_and_seconds() -> None:
    assert [duration(*pair) for pair in ((10, 0), (59, 1), (61, 1), (7325, 2), (7325, 1))] == [
        "-",
        "0:59",
        "1:01",
        "1:01:02",
        "2:02:05",
    ]


def test_without_a_terminal_each_report_is_a_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, 100_000, line_period=0.0)
    progress(status())
    progress({})
    progress(status(env_steps=26_000))
    lines = stream.getvalue().splitlines()
    assert [text.split(" ")[0] for text in lines] == ["25,000/100,000", "26,000/100,000"]
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_one_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = Terminal()
    progress = Progress(stream, 100_000)
    progress(status())
    clock[0] += 1.0
    progress(status(env_steps=26_000))
    progress.say("policy died")
    progress.end()
    text = stream.getvalue()
    assert [line.split(" ")[0] for line in text.split("\r")] == ["", "25,000/100,000", "26,000/100,000"]
    assert text.startswith("\r25,000/100,000 steps")
    assert text.endswith("\npolicy died\n")
    assert text.count("\n") == 2


def test_progress_reports_what_a_learner_lost_when_it_continues_from_a_checkpoint() -> None:
    stream: Any = io.StringIO()
    progress = Progress(stream, 100_000, line_period=1e9)
    progress(status())
    progress(status(env_steps=24_000, updates=14_100))
    assert "learner is back from its checkpoint: 900 updates and 1,000 steps lost" in stream.getvalue()


def test_resume_from_an_older_checkpoint_is_reported_once() -> None:
    """The run had made 1500 steps. The learner resumed at 1000 and then made 600 steps."""
    stream: Any = io.StringIO()
    progress = Progress(stream, 100_000, line_period=1e9, steps_made=1500)
    progress(status(env_steps=1600, began_at=1000))
    progress(status(env_steps=1700, began_at=1000))
    assert stream.getvalue().count("learner is back from its checkpoint: 500 steps lost") == 1
    assert stream.getvalue().count("back from") == 1


def test_steps_and_eta_and_return_stay_on_a_narrow_terminal() -> None:
    """The line drops figures until it fits. 60 columns are enough for the steps, the ETA and the return."""
    assert line(FIGURES, 100_000, width=100) == (
        "25,000/100,000 steps (25 %) | ETA 8:20 | 150 steps/s | 149 updates/s | ratio 1.00 | return 612"
    )
    assert line(FIGURES, 100_000, width=60) == "25,000/100,000 steps (25 %) | ETA 8:20 | return 612"
    large = {**FIGURES, "env_steps": 250_000.0, "return_mean": 2310.0}
    assert line(large, 1_000_000, width=52) == "250,000/1,000,000 (25 %) | ETA 1:23:20 | return 2310"
    assert line(large, 1_000_000, width=59) == "250,000/1,000,000 steps (25 %) | ETA 1:23:20 | return 2310"
    for width in range(10, 200):
        assert len(line(large, 1_000_000, width=width)) <= width


def test_the_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    Progress(stream, 100_000)(status())
    assert stream.getvalue() == "\r25,000/100,000 steps (25 %) | ETA - | return 612"


def test_the_eta_waits_for_a_typical_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner is slow after its start, resume or restart. So the line shows ``ETA -`` for the next 10 s."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    progress = Progress(stream, 100_000, line_period=0.0, steps_made=25_000)
    for now, began_at in ((100, 25_000), (109, 25_000), (110, 25_000), (111, 25_500), (121, 25_500)):
        clock[0] = float(now)
        progress(status(began_at=began_at, env_steps=25_500))
    left = [text.split(" | ")[1] for text in stream.getvalue().splitlines()]
    assert left == ["ETA -", "ETA -", "ETA 8:17", "ETA -", "ETA 8:17"]  # 74,500 steps at 150 steps/s


def test_a_terminal_shows_that_processes_are_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    stream = Terminal()
    Progress(stream, 100_000)({})
    assert stream.getvalue() == "\rstarting, 0 s"


def test_long_work_shows_its_percentage_and_time_beside_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal, written = Terminal(), threading.Event()
    monkeypatch.setattr(terminal, "flush", written.set)
    working = Working("", terminal)
    working.show("export " + "folder/" * 20, lambda: 0.25)
    with working:
        assert written.wait(60)
    shown = terminal.getvalue().split("\r\x1b[K")[1]
    # The last of the 60 columns stays empty. ", 25 %, 0 s" needs 11 columns, or 12 after 10 s. The text gets the rest.
    assert len(shown) == 59
    assert re.fullmatch(r"export (folder/)+f?o?l?d?e?r?, 25 %, \d+ s", shown)


def test_long_work_shows_its_text_and_time_on_a_terminal_only() -> None:
    plain, terminal = io.StringIO(), Terminal()
    with Working("nothing", plain):
        pass
    assert plain.getvalue() == ""
    written = threading.Event()
    write = terminal.write

    def noted(text: str) -> int:
        if "b.mcap" in text:
            written.set()
        return write(text)

    terminal.write = noted  # type: ignore[method-assign]
    with Working("export a.mcap", terminal) as working:
        working.show("export b.mcap")
        assert written.wait(60)
    assert "\r\x1b[Kexport b.mcap, " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
