"""Hook of MkDocs: if a file is not on the site, each link to it becomes plain text with the path of the file.

The site holds only the folder ``docs``, without Python files. A link such as ``../../tests/process/test_deploy.py``
works in the repository, but not on the site. The build warns if the file does not exist.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.plugins.hooks")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """In one page, replace the links to files that are not on the site."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            log.warning("%s links to %s, which does not exist in this project", page.file.src_uri, link[2])
            return link[0]
        if target.is_relative_to(ROOT / "docs") and target.suffix != ".py":
            return link[0]
        name = f"`{target.relative_to(ROOT)}`"
        return name if link[1].strip("`") in name else f"{link[1]} ({name})"

    return LINK.sub(replaced, markdown)
