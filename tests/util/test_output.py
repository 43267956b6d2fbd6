"""The tables of the command line."""

from __future__ import annotations

import sys

import pytest

from td3_robot.util.output import print_rows

ROWS = [{"name": "learner.batch_size", "allowed": "", "doc": "transitions in one update"}]


@pytest.mark.parametrize(
    ("terminal", "columns", "printed"),
    [
        (True, 60, "NAME                ALLOWED  DOC\nlearner.batch_size           transitions in one update\n"),
        (False, 20, "NAME                ALLOWED  DOC\nlearner.batch_size           transitions in one update\n"),
        (True, 20, "learner.batch_size\n  doc: transitions\n    in one update\n"),
    ],
)
def test_a_table_fits_a_narrow_terminal(
    terminal: bool, columns: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print_rows(ROWS, as_json=False)
    assert capsys.readouterr().out == printed
