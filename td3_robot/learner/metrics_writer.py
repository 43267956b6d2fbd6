"""Writes metrics: one JSON object a line in ``metrics.jsonl``, and TensorBoard events."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from td3_robot.util import files

TAGS = {
    "return_mean": "rollout/ep_rew_mean",
    "eval_return_mean": "eval/mean_reward",
    "eval_return_std": "eval/std_reward",
    "eval_length_mean": "eval/mean_ep_length",
    "steps_per_s": "time/fps",
    "updates_per_s": "time/updates_per_s",
    "wall_s": "time/time_elapsed",
    "episodes": "time/episodes",
    "updates": "train/n_updates",
}
"""TensorBoard tags of the keys of ``metrics.jsonl``: those of Stable-Baselines3, so that its dashboards work.

Other keys of training are ``train/KEY``, for example ``train/critic_loss``; those of evaluations are ``eval/KEY``.
"""


class MetricsWriter:
    """Appends records as they come; a crash loses at most the newest one.

    Raises:
        OSError: the disk is full or the files cannot be written.
    """

    def __init__(self, lines: Path, events: Path) -> None:
        self._lines = lines
        self._file = lines.open("a", encoding="utf-8")
        with lines.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if size and file.read(1) != b"\n":  # a full disk or power cut left half a line
                self._file.write("\n")
        self._events = SummaryWriter(str(events))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record; its numbers become TensorBoard scalars with the tags of :data:`TAGS`.

        Their axis is environment steps; for the kind ``offline``, it is updates.
        """
        axis = "updates" if record["kind"] == "offline" else "env_steps"
        with files.naming(self._lines):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != axis:
                self._events.add_scalar(_tag(record["kind"], key), value, record[axis])

    def close(self) -> None:
        with files.naming(self._lines):
            self._file.close()  # writes what a full disk did not take before
        self._events.close()


def _tag(kind: str, key: str) -> str:
    if kind == "offline":  # its axis is updates, so its curves must be apart
        return f"offline/{key}"
    return TAGS.get(key, f"{'eval' if kind == 'evaluation' else kind}/{key}")
