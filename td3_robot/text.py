"""Text that a file or a peer wrote, for a person's terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_LONGEST = 100  # characters


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """A value on one line of a terminal, which it cannot steer: escaped if need be, and cut where it is longer."""
    text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= longest else f"{text[:longest]}…"


def say(text: str) -> bool:
    """Print a line, or several, at once; False where nobody reads any more (``| head``)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nobody_reads()
        return False
    return True


def nobody_reads() -> None:
    """Have what is still in the buffer of standard output go nowhere, or leaving would fail over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
