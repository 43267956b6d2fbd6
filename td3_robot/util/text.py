"""Text for a person's terminal: what a file or a peer wrote, and what a person may have meant to write."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_LONGEST = 100  # characters
_ALIKE = 0.5  # of 1, which difflib gives to two words that are the same
_LISTED = 32  # words
STANDARD_OUTPUT = "standard output"
"""Names it in errors, as a file."""


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """A value on one line of a terminal, which it cannot steer: escaped if need be, and cut where it is longer."""
    text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= longest else f"{text[:longest]}…"


def near(word: str, known: Iterable[str], most: int = 1, alike: float = _ALIKE) -> list[str]:
    """The known words that this one is like, the likeliest first."""
    return difflib.get_close_matches(word, list(known), most, alike)


def meant(word: str, known: Iterable[str], otherwise: str) -> str:
    """A question for the known word that this one is like; where none is, the first ones after ``otherwise``."""
    words = list(known)
    if alike := near(word, words):
        return f"did you mean {alike[0]!r}?"
    return f"{otherwise} {', '.join(words[:_LISTED])}" + ", …" * (len(words) > _LISTED)


def say(text: str) -> bool:
    """Print a line, or several, at once; False where nobody reads any more (``| head``).

    Raises:
        OSError: it cannot be written otherwise.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nobody_reads()
        return False
    except OSError as error:
        nobody_reads()
        error.filename = STANDARD_OUTPUT
        raise
    return True


def nobody_reads() -> None:
    """Have what is still in the buffer of standard output go nowhere, or leaving would fail over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
