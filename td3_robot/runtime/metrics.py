"""Reads the records of ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(metrics: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of one kind, sorted by rising ``env_steps``. Skip a line that a crash cut off.

    All records of the kind ``offline`` are before the first step. They are sorted by rising ``updates``.

    After a resume the learner repeats some steps or updates. For these, return only the newer records.
    """
    axis = "updates" if kind == "offline" else "env_steps"
    records: list[dict[str, Any]] = []
    for text in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue
        if record.get("kind") == kind:
            while records and records[-1][axis] >= record[axis]:
                records.pop()
            records.append(record)
    return records
