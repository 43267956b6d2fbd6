"""The tables in the documentation are those of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "robots.md"


def test_the_document_is_up_to_date() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "td3_robot_sims.tables"], capture_output=True, text=True, check=True
    ).stdout
    _, _, tables = DOCUMENT.read_text(encoding="utf-8").partition("<!-- made by: python -m td3_robot_sims.tables -->\n")
    assert tables.strip() == printed.strip(), (
        "run: python -m td3_robot_sims.tables, and put its output into docs/robots.md"
    )
