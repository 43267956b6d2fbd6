"""Standard output that a reader may close."""

from __future__ import annotations

import os
import sys

STANDARD_OUTPUT = "standard output"
"""The file name of standard output in errors."""


def say(text: str) -> bool:
    """Print and flush lines; False if the reader has closed the pipe, as ``head`` does.

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
    """Send the rest of standard output nowhere, or Python would fail at exit when it flushes the buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
