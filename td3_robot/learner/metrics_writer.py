"""Writes metrics to ``metrics.jsonl``, one JSON object per line, and to TensorBoard event files."""

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
    "length_mean": "rollout/ep_len_mean",
    "eval_return_mean": "eval/mean_reward",
    "eval_return_std": "eval/std_reward",
    "eval_length_mean": "eval/mean_ep_length",
    "steps_per_s": "time/fps",
    "updates_per_s": "time/updates_per_s",
    "wall_s": "time/time_elapsed",
    "episodes": "time/episodes",
    "updates": "train/n_updates",
}
"""Maps keys of ``metrics.jsonl`` to TensorBoard tags.

If Stable-Baselines3 has a tag for a value, the value gets this tag. So one chart can compare runs of both packages.

All other keys of training get the tag ``train/KEY``, for example ``train/critic_loss``. All other keys of evaluations
get the tag ``eval/KEY``. All keys of offline updates get the tag ``offline/KEY``.
"""


class MetricsWriter:
    """Writes each line at once, so that a crash loses at most the newest line. TensorBoard files can be 120 s late."""

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
        """Write one record. Its numbers become TensorBoard scalars with the tags of :data:`TAGS`.

        The axis of the scalars is environment steps. For records of the kind ``offline`` it is updates.
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
            self._file.close()  # writes the text that a full disk did not accept before
        self._events.close()


def _tag(kind: str, key: str) -> str:
    if kind == "offline":  # the axis is updates, so the curves need their own tags
        return f"offline/{key}"
    return TAGS.get(key, f"{'eval' if kind == 'evaluation' else kind}/{key}")
