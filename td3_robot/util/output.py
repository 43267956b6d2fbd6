"""Writes to standard output, and raises no error if the reader has closed the pipe. Prints tables."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

STANDARD_OUTPUT = "standard output"
"""The name of standard output in errors."""


def say(text: str) -> bool:
    """Print and flush text. Return False if the reader has closed the pipe, as ``head`` does."""
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


def print_rows(rows: Sequence[dict[str, str]], *, as_json: bool) -> None:
    """Print rows as a table with a header line, or as one JSON object.

    A table needs at least one row. All rows have the same keys. On a terminal that is too narrow for the table, each
    value that is not empty has its own line.
    """
    if as_json:
        print(json.dumps({"rows": rows}))
        return
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    table = [
        "  ".join(f"{row[key]:<{width}}" for key, width in widths.items()).rstrip()
        for row in ({key: key.upper() for key in widths}, *rows)
    ]
    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(len, table)) <= columns:
        print("\n".join(table))
        return
    for row in rows:
        first, *others = row.items()
        lines = [first[1], *(f"  {key}: {value}" for key, value in others if value)]
        print("\n".join(textwrap.fill(line, columns, subsequent_indent="    ") for line in lines))
