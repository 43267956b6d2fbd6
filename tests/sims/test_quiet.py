"""``without_lines`` drops only the lines that start with a given text, even if C code writes the lines."""

from __future__ import annotations

import os

import pytest
from td3_robot_sims.quiet import without_lines


def test_only_lines_with_the_given_beginning_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with without_lines(b"chatter:"):
        os.write(2, b"chatter: one\nreal trouble\nchatter: two\nmore trouble\n")
    os.write(2, b"chatter: after\n")
    assert capfd.readouterr().err == "real trouble\nmore trouble\nchatter: after\n"


def fail() -> None:
    with without_lines(b"chatter:"):
        os.write(2, b"chatter: one\nlast line\n")
        raise OSError("broken")


def test_lines_that_are_not_dropped_are_written_even_after_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="broken"):
        fail()
    assert capfd.readouterr().err == "last line\n"
