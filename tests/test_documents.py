"""The documents: links to files, quoted errors, named tests, and the length of README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_names_an_existing_file(page: Path) -> None:
    """MkDocs checks links between pages in docs/, with their anchors.

    This test also checks links from docs/ to other files, and links in other documents.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_quoted_error_is_in_the_code() -> None:
    page = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
    table = page.split("## By error")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    files = [*(ROOT / "td3_robot").rglob("*.py"), *(ROOT / "sims").rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert len(quoted) >= 20
    assert [text for text in quoted if text not in code] == []


@pytest.mark.parametrize("page", ["guarantees", "security"])
def test_every_named_test_exists(page: str) -> None:
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 15
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 9000
