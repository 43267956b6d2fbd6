"""The progress line, on a terminal and in a file."""

from __future__ import annotations

import io
from typing import Any

from td3_robot.messages import Status
from td3_robot.runtime.progress import Progress, duration, line

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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line() -> None:
    """75,000 steps are left. At 150 steps/s they take 500 s, which is 8 min 20 s."""
    assert line(FIGURES, 100_000) == (
        "25,000/100,000 steps (25 %) | ETA 8:20 | 150 steps/s | 149 updates/s | ratio 1.00 | return 612 | "
        "stale 6 updates"
    )
    assert line({}, 100).startswith("0/100 steps (0 %) | ETA - | 0 steps/s")
    assert "return - |" in line({}, 100)


def test_durations() -> None:
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


def test_on_a_terminal_one_line_is_rewritten() -> None:
    stream = Terminal()
    progress = Progress(stream, 100_000)
    progress(status())
    progress.say("policy died")
    progress.end()
    text = stream.getvalue()
    assert text.startswith("\r25,000/100,000 steps")
    assert text.endswith("\npolicy died\n")


def test_return_to_a_checkpoint_is_reported() -> None:
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
