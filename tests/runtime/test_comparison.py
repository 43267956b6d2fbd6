"""The comparison of all runs in a folder. ``tests/dashboard/test_compare.py`` tests its page."""

from __future__ import annotations

from pathlib import Path

from td3_robot.runtime.comparison import compare


def test_a_date_in_the_configuration_of_another_program_is_a_value_like_any_other(tmp_path: Path) -> None:
    for name, text in {"a": "made: 2024-01-01", "b": "made: 2024-01-02", "c": "made: 2024-01-02"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    compared = compare(tmp_path)
    assert compared["keys"] == ["made"]
    assert [band["label"] for band in compared["bands"]] == ["a", "made 2024-01-02 (2 seeds)"]
