"""Text that a file or a peer wrote, for a person's terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LONGEST = 100  # characters


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """A value on one line of a terminal, which it cannot steer: escaped if need be, and cut where it is longer."""
    text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= longest else f"{text[:longest]}…"
