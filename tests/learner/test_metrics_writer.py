"""A run's metrics are lines of JSON, however the previous process ended."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from td3_robot.learner.metrics_writer import MetricsWriter


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", []),
        ('{"kind": "train", "env_steps": 1}\n', [1]),
        ('{"kind": "train", "env_steps": 1}\n{"kind": "tra', [1]),
        ('{"ki', []),
    ],
)
def test_an_incomplete_line_does_not_affect_others(before: str, after: list[int], tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(before)
    with contextlib.closing(MetricsWriter(file, tmp_path / "events")) as metrics:
        metrics.write({"kind": "train", "env_steps": 2})
    good = []
    for line in file.read_text().splitlines():
        try:
            good.append(json.loads(line)["env_steps"])
        except ValueError:
            assert line in before
    assert good == [*after, 2]
