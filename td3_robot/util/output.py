"""Writes to standard output, which a reader may close."""

from __future__ import annotations

import os
import sys

STANDARD_OUTPUT = "standard output"
"""The name of standard output in errors."""


def say(text: str) -> bool:
    """Print and flush text. Return False if the reader has closed the pipe, as ``head`` does.

    Raises:
        OSError: the text cannot be written for another reason.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()
        return False
    except OSError as error:
        discard_output()
        error.filename = STANDARD_OUTPUT
        raise
    return True


def discard_output() -> None:
    """Redirect standard output to the null device. Otherwise Python's flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
