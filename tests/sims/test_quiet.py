"""Only the lines that were named are kept from standard error."""

from __future__ import annotations

import os

import pytest

from sims.quiet import without_lines


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
