"""Defines the rule for names, makes texts from files and peers safe to print, and suggests corrections."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names of processes, robots and keys."""
NAME_RULE = "1 to 64 letters, digits, '_', '-' and '.'"
_LONGEST = 100  # characters
_ALIKE = 0.5  # difflib's ratio, which is 1 for equal words
_LISTED = 32  # words


def printable(text: str) -> str:
    """Return text from a file or a peer as one line, without characters that could control the terminal."""
    return text if text.isprintable() else repr(text)


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """Return a value as one line of printable characters, without terminal control codes.

    If the line is longer than ``longest`` characters, cut the rest and append "…".
    """
    text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
    text = printable(text)
    return text if len(text) <= longest else f"{text[:longest]}…"


def exception_line(error: BaseException) -> str:
    """Return the type and the text of an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def occurrence(times: int) -> str | None:
    """Return the end of a log line about occurrence number ``times`` of a problem; None if it gets no line.

    Only the 1st, 2nd, 4th, 8th, … occurrence gets a line, so that a problem that comes and goes does not fill the disk.
    """
    if times & (times - 1):
        return None
    return f" ({times} times so far)" if times > 1 else ""


def similar(word: str, known: Iterable[str], most: int = 1, alike: float = _ALIKE) -> list[str]:
    """Return at most ``most`` known words that are similar to ``word``, the most similar first."""
    return difflib.get_close_matches(word, list(known), most, alike)


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the question "did you mean …?" with the most similar known word.

    If no known word is similar, return ``otherwise`` and the first 32 known words.
    """
    words = list(known)
    if alike := similar(word, words):
        return f"did you mean {alike[0]!r}?"
    return f"{otherwise} {', '.join(words[:_LISTED]) or 'none'}" + ", …" * (len(words) > _LISTED)
