"""Reads the records of ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(metrics: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of one kind, sorted by rising ``env_steps``.

    Skip each incomplete or damaged line, and each record without its axis. Return [] if there is no file.

    Records of the kind ``offline`` are sorted by rising ``updates``, because they are all from before the first step.

    After a resume the learner repeats some steps or updates. For these, return only the newer records.
    """
    if not metrics.is_file():  # is_file() is False for a link to a device, whose content may have no end
        return []
    axis = "updates" if kind == "offline" else "env_steps"
    records: list[dict[str, Any]] = []
    for line in metrics.read_bytes().splitlines():
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):  # a crash, a full disk or a defective disk damaged the line
            continue
        if not isinstance(record, dict) or record.get("kind") != kind or type(record.get(axis)) not in (int, float):
            continue
        while records and records[-1][axis] >= record[axis]:
            records.pop()
        records.append(record)
    return records


def final(metrics: Path) -> dict[str, Any] | None:
    """Return the newest evaluation if it is of the final policy; otherwise None."""
    evaluations = read(metrics, "evaluation")
    return evaluations[-1] if evaluations and evaluations[-1].get("final") else None
