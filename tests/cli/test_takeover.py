"""What ``td3-robot node takeover`` does with lines of its standard input."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from td3_robot.cli.takeover import drive
from td3_robot.errors import UsageError


class Robot:
    """Replaces :class:`td3_robot.operators.Takeover` in these tests. The robot has two action channels."""

    actions = ({"name": "hip", "unit": "N m"}, {"name": "knee", "unit": "N m"})

    def __init__(self) -> None:
        self.period_s = 60.0  # so long that a slow machine can read all lines of a test in one period
        self.sent: list[Sequence[float]] = []
        self.open = True

    def check(self, action: Sequence[str]) -> list[float]:
        return [float(value) for value in action]

    def command(self, action: Sequence[float]) -> None:
        self.sent.append(action)

    def wait(self) -> None:
        """Return at once: this robot has no control period."""

    def close(self) -> None:
        self.open = False


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def driven(pipe: tuple[int, int], text: bytes) -> Any:
    """Call :func:`drive` with ``text`` as its input. Return the takeover to which it sent the actions."""
    robot: Any = Robot()
    os.write(pipe[1], text)
    os.close(pipe[1])
    drive(robot, pipe[0])
    return robot


def test_the_newest_of_several_lines_is_sent_once(pipe: tuple[int, int]) -> None:
    robot = driven(pipe, b"0.5 0.5\n0.1 0.2\n")
    assert (robot.sent, robot.open) == ([[0.1, 0.2]], False)  # after close(), the robot applies the safe action


def test_lines_that_fill_the_pipe_are_read_in_one_control_period(pipe: tuple[int, int]) -> None:
    """If lines stayed in the pipe, the robot would get each action late."""
    lines = b"0.5 0.5\n" * 8000 + b"0.1 0.2\n"  # 64,008 bytes; a pipe of Linux holds 65,536
    assert driven(pipe, lines).sent == [[0.1, 0.2]]


def test_the_line_q_ends_the_input_but_leaves_the_takeover_open(pipe: tuple[int, int]) -> None:
    """The caller of ``drive`` then gives the robot back."""
    assert driven(pipe, b"q\n0.1 0.2\n").open


@pytest.mark.parametrize("text", [b"0.1 0.2", b"0.1 0.2\n0.1 0", b"0.1 0.2\nq"])
def test_a_last_line_without_newline_is_an_error(pipe: tuple[int, int], text: bytes) -> None:
    """The program that writes the lines may fail in the middle of a number: ``0`` may be the beginning of ``0.25``."""
    last = text.decode().split("\n")[-1]
    with pytest.raises(UsageError, match=f"the last line '{last}' has no newline, so it may be incomplete"):
        driven(pipe, text)


def test_the_channels_are_printed_before_the_first_line(
    pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    driven(pipe, b"q\n")
    assert capsys.readouterr() == ("", "ready; each line: one number for each of hip (N m), knee (N m); or q\n")
