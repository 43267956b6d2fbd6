"""Some lines of output are dropped, and standard output can go to standard error."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from td3_robot_sims.quiet import caught_stdout, stdout_to_stderr, without_lines


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


def test_caught_output_of_c_code_also_goes_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(None)
    library.fflush(None)
    capfd.readouterr()
    library.puts(b"before")
    with caught_stdout() as said:
        library.printf(b"inside, without an end of the line")
    with caught_stdout() as nothing:
        pass
    library.puts(b"after")
    library.fflush(None)
    assert said == ["inside, without an end of the line"]
    assert nothing == []
    assert capfd.readouterr().out == "before\ninside, without an end of the line\nafter\n"


def fail_loudly() -> None:
    with caught_stdout():
        os.write(1, b"last line\n")
        raise OSError("broken")


def test_caught_output_is_written_even_after_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="broken"):
        fail_loudly()
    assert capfd.readouterr().out == "last line\n"


def test_threads_that_catch_output_at_once_restore_standard_output() -> None:
    def catch(number: int) -> list[str]:
        with caught_stdout() as said:
            os.write(1, b"%d\n" % number)
        return said

    before = os.fstat(1)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(catch, range(100))) == [[f"{number}\n"] for number in range(100)]
    assert os.path.samestat(os.fstat(1), before)
