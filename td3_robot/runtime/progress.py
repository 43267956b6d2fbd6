"""What the person watching a training sees: one line, rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from td3_robot.messages import Status

_REWRITE_PERIOD = 0.5


class Progress:
    """Shows the learner's figures on ``stream``; other lines go through :meth:`say`, so that nothing is overwritten."""

    def __init__(self, stream: TextIO, total_steps: int, line_period: float = 10.0, steps_made: int = 0) -> None:
        self._stream = stream
        self._total = total_steps
        self._line_period = line_period  # seconds between plain lines
        self._before: dict[str, float] = {"env_steps": steps_made}  # what is less than before was lost
        self._terminal = stream.isatty()
        self._next = float("-inf")
        self._width = 0  # of the line that stands unfinished on the terminal

    def __call__(self, statuses: dict[str, Status]) -> None:
        """Show the newest figures, if it is time."""
        now = time.monotonic()
        learner = statuses.get("learner")
        if learner is None or not learner.figures:  # it is starting: where it goes on from is not known yet
            return
        now_made = dict(learner.figures)
        if now_made.get("began_at") != self._before.get("began_at"):  # another process, which may be beyond that by now
            now_made["env_steps"] = now_made.get("began_at", 0)
        steps, updates = (self._before.get(key, 0) - now_made.get(key, 0) for key in ("env_steps", "updates"))
        if max(steps, updates) > 0:
            lost = (
                f"{max(0, updates):,.0f} updates and " * ("updates" in self._before)
                + f"{max(0, steps):,.0f} steps lost"
            )
            self.say(f"learner is back from its checkpoint: {lost}")
        self._before = learner.figures
        if now < self._next:
            return
        self._next = now + (_REWRITE_PERIOD if self._terminal else self._line_period)
        text = line(learner.figures, self._total)
        if self._terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line of its own."""
        self.end()
        self._stream.write(text + "\n")
        self._stream.flush()

    def end(self) -> None:
        """Finish the line that is being rewritten."""
        if self._width:
            self._stream.write("\n")
            self._width = 0


def line(figures: dict[str, float], total_steps: int) -> str:
    """The progress line of a learner's figures."""
    steps, speed = figures.get("env_steps", 0.0), figures.get("steps_per_s", 0.0)
    left = max(0.0, total_steps - steps)
    shown = "-" if "return_mean" not in figures else f"{figures['return_mean']:.0f}"
    return (
        f"{steps:,.0f}/{total_steps:,} steps ({100 * steps / total_steps:.0f} %) | ETA {duration(left, speed)} | "
        f"{speed:.0f} steps/s | {figures.get('updates_per_s', 0.0):.0f} updates/s | "
        f"ratio {figures.get('replay_ratio', 0.0):.2f} | return {shown} | "
        f"stale {figures.get('staleness_updates', 0.0):.0f} updates"
    )


def duration(amount: float, speed: float) -> str:
    """How long ``amount`` takes at ``speed`` a second, as hours, minutes and seconds."""
    if speed <= 0:
        return "-"
    seconds = round(amount / speed)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
