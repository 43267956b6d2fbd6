"""Reads the records of ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(metrics: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of one kind, sorted by rising ``env_steps``.

    Skip incomplete lines. Return [] if there is no file.

    Records of the kind ``offline`` are sorted by rising ``updates``, because they are all from before the first step.

    After a resume the learner repeats some steps or updates. For these, return only the newer records.
    """
    if not metrics.is_file():  # is_file() is False for a link to a device, whose content may have no end
        return []
    axis = "updates" if kind == "offline" else "env_steps"
    records: list[dict[str, Any]] = []
    for text in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(text)
        except ValueError:  # a crash or a full disk left the line incomplete
            continue
        if record.get("kind") == kind:
            while records and records[-1][axis] >= record[axis]:
                records.pop()
            records.append(record)
    return records


def final(metrics: Path) -> dict[str, Any] | None:
    """Return the newest evaluation if it is of the final policy; otherwise None."""
    evaluations = read(metrics, "evaluation")
    return evaluations[-1] if evaluations and evaluations[-1].get("final") else None
