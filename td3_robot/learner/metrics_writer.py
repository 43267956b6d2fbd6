"""Writes metrics: one JSON object a line in ``metrics.jsonl``, and TensorBoard events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from td3_robot.util import files


class MetricsWriter:
    """Appends records as they come; a crash loses at most the newest one.

    Raises:
        OSError: the disk is full or the files cannot be written.
    """

    def __init__(self, lines: Path, events: Path) -> None:
        self._lines = lines
        self._file = lines.open("a", encoding="utf-8")
        if not (lines.read_bytes() or b"\n").endswith(b"\n"):  # a full disk or power cut left half a line
            self._file.write("\n")
        self._events = SummaryWriter(str(events))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record; its numbers become TensorBoard scalars, named by its kind.

        Their axis is environment steps; for the kind ``offline``, it is updates.
        """
        axis = "updates" if record["kind"] == "offline" else "env_steps"
        with files.naming(self._lines):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != axis:
                self._events.add_scalar(f"{record['kind']}/{key}", value, record[axis])

    def close(self) -> None:
        with files.naming(self._lines):
            self._file.close()  # writes what a full disk did not take before
        self._events.close()
