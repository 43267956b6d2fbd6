"""Shows the progress of long work, such as a training, as one line. On a terminal, new text replaces this line."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from td3_robot.messages import Status

_REWRITE_PERIOD = 0.5  # seconds
_SETTLED = 10.0  # seconds from the start of a learner until its speed is typical
_LEAST_IMPORTANT = ("stale", "ratio", "updates", "speed", "steps", "return")
"""Parts that the line omits on a narrow terminal, in this order. The part ``steps`` loses only the word "steps"."""


class Progress:
    """Shows the learner's figures. Print other lines with :meth:`say`, so that they do not overwrite the progress line.

    Args:
        total_steps: environment steps of the whole training.
        line_period: seconds between two lines if the stream is not a terminal.
        steps_made: environment steps that the run made before a resume. The checkpoint may have fewer steps.
    """

    def __init__(self, stream: TextIO, total_steps: int, line_period: float = 10.0, steps_made: int = 0) -> None:
        self._stream = stream
        self._total = total_steps
        self._line_period = line_period
        self._shown: dict[str, float] = {"env_steps": steps_made}
        self._terminal = stream.isatty()
        self._next = float("-inf")
        self._width = 0  # characters of the progress line on the terminal
        self._begun = time.monotonic()
        self._learning: float | None = None  # time (s) when the current learner first reported

    def __call__(self, statuses: dict[str, Status]) -> None:
        """Show the newest figures if the last line is old enough."""
        now = time.monotonic()
        learner = statuses.get("learner")
        if learner is None or not learner.figures:  # the learner compiles, or no simulator has joined yet
            if self._terminal and now >= self._next:
                self._next = now + _REWRITE_PERIOD
                self._rewrite(f"starting, {now - self._begun:.0f} s")
            return
        if self._learning is None or learner.figures.get("began_at") != self._shown.get("began_at"):
            self._learning = now
        self._report_losses(learner.figures)
        self._shown = learner.figures
        if now < self._next:
            return
        self._next = now + (_REWRITE_PERIOD if self._terminal else self._line_period)
        settled = now - self._learning >= _SETTLED
        if self._terminal:
            self._rewrite(line(learner.figures, self._total, settled, _columns(self._stream)))
        else:
            self._stream.write(line(learner.figures, self._total, settled) + "\n")
            self._stream.flush()

    def _rewrite(self, text: str) -> None:
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def _report_losses(self, figures: dict[str, float]) -> None:
        """If the learner continues from a checkpoint, print how many updates and steps it has lost."""
        begun = dict(figures)
        # A restarted learner may already have made new steps. So compare with the step at which it restarted.
        if begun.get("began_at") != self._shown.get("began_at"):
            begun["env_steps"] = begun.get("began_at", 0)
        steps, updates = (max(0, self._shown.get(key, 0) - begun.get(key, 0)) for key in ("env_steps", "updates"))
        if steps or updates:
            lost = f"{updates:,.0f} updates and " if "updates" in self._shown else ""
            self.say(f"learner is back from its checkpoint: {lost}{steps:,.0f} steps lost")

    def say(self, text: str) -> None:
        """Print a line below the progress line."""
        self.end()
        self._stream.write(text + "\n")
        self._stream.flush()

    def end(self) -> None:
        """End the progress line with a line break."""
        if self._width:
            self._stream.write("\n")
            self._width = 0


def line(figures: dict[str, float], total_steps: int, settled: bool = True, width: int | None = None) -> str:
    """Return the progress line for the figures of a learner's Status, with at most ``width`` characters.

    The line shows the remaining time only if ``settled``, that is, if the speed is typical.
    """
    steps, speed = figures.get("env_steps", 0.0), figures.get("steps_per_s", 0.0)
    left = duration(max(0.0, total_steps - steps), speed) if settled else "-"
    shown = "-" if "return_mean" not in figures else f"{figures['return_mean']:.0f}"
    parts = {
        "steps": f"{steps:,.0f}/{total_steps:,} steps ({100 * steps / total_steps:.0f} %)",
        "left": f"ETA {left}",
        "speed": f"{speed:.0f} steps/s",
        "updates": f"{figures.get('updates_per_s', 0.0):.0f} updates/s",
        "ratio": f"ratio {figures.get('replay_ratio', 0.0):.2f}",
        "return": f"return {shown}",
        "stale": f"stale {figures.get('staleness_updates', 0.0):.0f} updates",
    }
    for name in _LEAST_IMPORTANT:
        text = " | ".join(parts.values())
        if width is None or len(text) <= width:
            return text
        if name == "steps":
            parts["steps"] = parts["steps"].replace(" steps", "")
        else:
            del parts[name]
    return " | ".join(parts.values())[:width]


def duration(amount: float, speed: float) -> str:
    """Return how long ``amount`` takes at ``speed`` per second, as ``H:MM:SS`` or ``M:SS``.

    The result is ``-`` if ``speed`` is 0.
    """
    if speed <= 0:
        return "-"
    seconds = round(amount / speed)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _columns(stream: TextIO) -> int:
    """Return how many characters fit in a line of the stream's terminal. COLUMNS in the environment has priority."""
    with contextlib.suppress(OSError, ValueError):  # the stream is not a terminal, or COLUMNS is not a number
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns) - 1
    return shutil.get_terminal_size().columns - 1


class Working:
    """Shows on a terminal what a command does and how long it has run. It prints nothing to a file or a pipe.

    Use it as a context manager. A thread updates the line. :meth:`show` replaces the text.
    """

    def __init__(self, text: str, stream: TextIO | None = None) -> None:
        self._text = text
        self._share: Callable[[], float] | None = None
        self._stream = stream or sys.stderr
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Working:
        if self._stream.isatty():
            self._thread = threading.Thread(target=self._rewrite, daemon=True, name="progress")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()
            self._stream.write("\r\x1b[K")  # ECMA-48: erase to the end of the line
            self._stream.flush()

    def show(self, text: str, share: Callable[[], float] | None = None) -> None:
        """Replace the text. ``share`` returns the share of the work that is done, 0 to 1."""
        self._text, self._share = text, share

    def _rewrite(self) -> None:
        begun = time.monotonic()
        while not self._over.wait(_REWRITE_PERIOD):
            done = f", {100 * self._share():.0f} %" if self._share else ""
            elapsed = f"{done}, {time.monotonic() - begun:.0f} s"
            self._stream.write("\r\x1b[K" + self._text[: max(0, _columns(self._stream) - len(elapsed))] + elapsed)
            self._stream.flush()
