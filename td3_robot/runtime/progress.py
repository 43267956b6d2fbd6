"""Shows the progress of a training: one line that is rewritten on a terminal, or plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from td3_robot.messages import Status

_REWRITE_PERIOD = 0.5  # seconds


class Progress:
    """Shows the learner's figures. Print other lines with :meth:`say`, so that they do not overwrite the progress line.

    Args:
        stream: where to print.
        total_steps: environment steps of the whole training.
        line_period: seconds between two plain lines.
        steps_made: environment steps before a resume. The learner may continue from a checkpoint with fewer steps.
    """

    def __init__(self, stream: TextIO, total_steps: int, line_period: float = 10.0, steps_made: int = 0) -> None:
        self._stream = stream
        self._total = total_steps
        self._line_period = line_period
        self._shown: dict[str, float] = {"env_steps": steps_made}
        self._terminal = stream.isatty()
        self._next = float("-inf")
        self._width = 0  # characters of the progress line on the terminal

    def __call__(self, statuses: dict[str, Status]) -> None:
        """Show the newest figures if the last line is old enough."""
        now = time.monotonic()
        learner = statuses.get("learner")
        if learner is None or not learner.figures:  # the learner has not loaded its checkpoint yet
            return
        self._report_losses(learner.figures)
        self._shown = learner.figures
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

    def _report_losses(self, figures: dict[str, float]) -> None:
        """If the learner continues from a checkpoint, print how many updates and steps it has lost."""
        begun = dict(figures)
        # A restarted learner may have made new steps already. So compare with the step at which it began.
        if begun.get("began_at") != self._shown.get("began_at"):
            begun["env_steps"] = begun.get("began_at", 0)
        steps, updates = (max(0, self._shown.get(key, 0) - begun.get(key, 0)) for key in ("env_steps", "updates"))
        if steps or updates:
            lost = f"{updates:,.0f} updates and " if "updates" in self._shown else ""
            self.say(f"learner is back from its checkpoint: {lost}{steps:,.0f} steps lost")

    def say(self, text: str) -> None:
        """Print a line."""
        self.end()
        self._stream.write(text + "\n")
        self._stream.flush()

    def end(self) -> None:
        """End the progress line with a line break."""
        if self._width:
            self._stream.write("\n")
            self._width = 0


def line(figures: dict[str, float], total_steps: int) -> str:
    """Return the progress line for a learner's figures."""
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
    """Return the time for ``amount`` at ``speed`` per second, as text with hours, minutes and seconds."""
    if speed <= 0:
        return "-"
    seconds = round(amount / speed)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
