"""The comparison of all runs in a folder. ``tests/dashboard/test_compare.py`` tests its page."""

from __future__ import annotations

from pathlib import Path

from td3_robot.runtime.comparison import compare


def test_a_date_in_a_configuration_is_compared_like_any_other_value(tmp_path: Path) -> None:
    """The folder may also hold a ``config.yaml`` of another program. Keys of td3-robot never have dates."""
    for name, text in {"a": "made: 2024-01-01", "b": "made: 2024-01-02", "c": "made: 2024-01-02"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    compared = compare(tmp_path)
    assert compared["keys"] == ["made"]
    assert [band["label"] for band in compared["bands"]] == ["a", "made 2024-01-02 (2 seeds)"]
