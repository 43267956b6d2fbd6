"""The comparison of all runs in a folder.

``tests/dashboard/test_compare.py`` tests the page that shows this comparison.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from td3_robot.runtime import comparison
from td3_robot.runtime.comparison import compare


def test_a_date_in_a_configuration_is_compared_like_any_other_value(tmp_path: Path) -> None:
    """No value in a configuration of td3-robot is a date. But the ``config.yaml`` may come from another program."""
    for name, text in {"a": "made: 2024-01-01", "b": "made: 2024-01-02", "c": "made: 2024-01-02"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    compared = compare(tmp_path)
    assert compared["keys"] == ["made"]
    assert [band["label"] for band in compared["bands"]] == ["a", "made 2024-01-02 (2 seeds)"]


def test_the_comparison_says_how_many_runs_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_RUNS", 2)
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 1")
    compared = compare(tmp_path)
    assert ([run["name"] for run in compared["runs"]], compared["left_out"]) == (["a", "b"], 1)
