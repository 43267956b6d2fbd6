"""``td3-robot node takeover``: drives a robot with the keyboard, or with lines from a program."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from td3_robot.errors import UsageError
from td3_robot.operators import Takeover
from td3_robot.util.output import say
from td3_robot.util.text import one_line

_PATIENCE = 2.0  # this command sends actions for this many seconds after the newest key
_PRESSES = 20  # key presses from the lower to the upper limit of a channel
_KEYS = f"""keys:
  left, right  choose a channel
  up, down     raise or lower its value by 1/{_PRESSES} of its range
  0            set every channel to 0, or to the limit nearest to 0
  space        keep the values
  q            give the robot back, and end
Press a key at least every {_PATIENCE:g} s. After a longer pause the robot gets the safe action until you press a key.
Ctrl-C ends without giving the robot back: the robot keeps the safe action."""

_UP, _DOWN, _RIGHT, _LEFT = "ABCD"  # the last letter of the code that a terminal sends for the arrow key
_KEY = re.compile("\x1b[\\[O]([ABCD])|([q0])")


def drive(robot: Takeover, source: int) -> None:
    """Send actions until the letter q, or the end of the input.

    At the end of the input the robot keeps the safe action, because the program that writes the input may have failed.

    Args:
        robot: the takeover.
        source: file descriptor of the input. If the input is a terminal, the function reads single keys. It sends the
            newest action in each control period, for up to 2 s after the newest key. If the input is not a terminal,
            each line is the letter q or one action: one number for each channel, separated by spaces. The function
            sends an action only once, not in each control period. If several lines come in one control period, the
            function sends only the action of the last line.

    Raises:
        CommandError: the server refuses the actions, or does not answer.
        UsageError: a line is not an action, or the last line has no newline.
    """
    with _keys_at_once(source):
        pilot = Keyboard(robot.actions) if os.isatty(source) else Lines(robot)
        ended = False
        while not ended:
            until = time.monotonic() + robot.period_s / 2
            while not ended and select.select([source], [], [], 0)[0]:  # an unread line would delay later lines
                data = os.read(source, 1 << 16)
                if not pilot.read(data.decode("utf-8", "replace")):
                    return
                ended = not data
                if time.monotonic() > until:  # the input is faster than this loop
                    break
            if action := pilot.action():
                robot.command(action)
            robot.wait()
        robot.close()


class Keyboard:
    """Changes an action according to pressed keys. Every channel begins at 0, or at the limit nearest to 0."""

    def __init__(self, channels: Sequence[dict[str, Any]]) -> None:
        self.channels = channels
        self._values = self._zero()
        self._pressed_at = float("-inf")
        self._chosen = 0
        say(_KEYS)
        self._show()

    def action(self) -> list[float] | None:
        """The action to send now; None if the newest key is too old."""
        return self._values if time.monotonic() - self._pressed_at <= _PATIENCE else None

    def read(self, text: str) -> bool:
        """Apply the keys of ``text``. Return False if the person wants to end."""
        if text:
            self._pressed_at = time.monotonic()
        for arrow, key in _KEY.findall(text):
            if key == "q":
                return False
            if key == "0":
                self._values = self._zero()
            elif arrow in (_RIGHT, _LEFT):
                self._chosen = (self._chosen + (1 if arrow == _RIGHT else -1)) % len(self.channels)
            else:
                channel = self.channels[self._chosen]
                step = (channel["high"] - channel["low"]) / _PRESSES
                changed = self._values[self._chosen] + (step if arrow == _UP else -step)
                self._values[self._chosen] = min(max(changed, channel["low"]), channel["high"])
        self._show()
        return True

    def _zero(self) -> list[float]:
        return [min(max(0.0, channel["low"]), channel["high"]) for channel in self.channels]

    def _show(self) -> None:
        """Print the chosen channel. The text replaces the current line of the terminal."""
        channel, value = self.channels[self._chosen], self._values[self._chosen]
        text = one_line(f"{channel['name']} {value:+.3f} {channel['unit']}", 70)
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


class Lines:
    """Reads actions from lines of numbers."""

    def __init__(self, robot: Takeover) -> None:
        self._newest: list[float] | None = None
        self._robot = robot
        self._rest = ""
        channels = ", ".join(f"{channel['name']} ({channel['unit']})" for channel in robot.actions)
        print(one_line(f"ready; each line: one number for each of {channels}; or q", 400), file=sys.stderr, flush=True)

    def action(self) -> list[float] | None:
        """The action of the newest complete line; None if no complete line has come since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def read(self, text: str) -> bool:
        """Read more text; empty text is the end of the input. Return False after a line ``q``.

        Raises:
            UsageError: a line is not an action, or the input ends within a line.
        """
        if not text and self._rest:  # the program may have failed while it wrote a number
            raise UsageError(f"the last line {one_line(self._rest, 70)!r} has no newline, so it may be incomplete")
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip() == "q":
                return False
            try:
                self._newest = self._robot.check(line.split())
            except ValueError:
                allowed = f"{len(self._robot.actions)} finite number(s), or q"
                raise UsageError(f"the line {one_line(line, 70)!r} is not an action; allowed: {allowed}") from None
        return True


@contextmanager
def _keys_at_once(source: int) -> Iterator[None]:
    """Let a terminal pass each key at once and without echo. Restore the terminal at the end.

    Keys that a person pressed before this call are lost: they must not move the robot.
    """
    if not os.isatty(source):
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(source)
    tty.setcbreak(source)
    try:
        yield
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
        print(file=sys.stderr)
