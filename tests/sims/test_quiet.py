"""Some lines of output are dropped, and standard output can go to standard error."""

from __future__ import annotations

import ctypes
import os

import pytest
from td3_robot_sims.quiet import stdout_to_stderr, without_lines


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


def test_output_of_python_and_c_code_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """C code keeps "before" and "inside" in its buffer. Nevertheless, "before" goes to standard output."""
    library = ctypes.CDLL(None)
    library.fflush(None)  # an earlier test can have left text in C's buffer
    capfd.readouterr()
    library.puts(b"before")
    with stdout_to_stderr():
        library.puts(b"inside")
        print("inside, from Python")
    library.puts(b"after")
    library.fflush(None)
    output = capfd.readouterr()
    assert output.out == "before\nafter\n"
    assert sorted(output.err.splitlines()) == ["inside", "inside, from Python"]
