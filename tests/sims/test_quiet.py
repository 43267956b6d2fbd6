"""Only the named lines are removed from standard error."""

from __future__ import annotations

import ctypes
import os

import pytest
from td3_robot_sims.quiet import c_output_on_stderr, without_lines


def test_drops_what_was_named_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with without_lines(b"chatter:"):
        os.write(2, b"chatter: one\nreal trouble\nchatter: two\nmore trouble\n")
    os.write(2, b"chatter: after\n")
    assert capfd.readouterr().err == "real trouble\nmore trouble\nchatter: after\n"


def fail() -> None:
    with without_lines(b"chatter:"):
        os.write(2, b"chatter: one\nlast words\n")
        raise OSError("broken")


def test_an_exception_takes_nothing_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="broken"):
        fail()
    assert capfd.readouterr().err == "last words\n"


def test_what_c_prints_goes_to_standard_error_also_from_its_buffer(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(None)
    library.puts(b"before")
    with c_output_on_stderr():
        library.puts(b"inside")
    library.puts(b"after")
    library.fflush(None)
    assert capfd.readouterr() == ("before\nafter\n", "inside\n")
