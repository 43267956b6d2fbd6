"""The version of td3-robot."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path


def _version() -> str:
    try:
        return metadata.version("td3-robot")
    except metadata.PackageNotFoundError:  # Python imports td3-robot from a checkout that is not installed
        project = Path(__file__).parents[2] / "pyproject.toml"
        found = re.search(r'^version = "(.+)"$', project.read_text("utf-8"), re.MULTILINE) if project.exists() else None
        return found[1] if found else "unknown"


__version__ = _version()
