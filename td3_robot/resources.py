"""Finds the data that travels with the package: configurations and launch descriptions.

In a wheel they lie in ``td3_robot/data``; in a checkout, in the top-level folders of the same names.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from td3_robot.errors import ConfigError
from td3_robot.text import near

_PACKAGE = Path(__file__).parent


def folder(kind: str) -> Path:
    """The folder of shipped ``configs`` or ``launch`` files."""
    installed = _PACKAGE / "data" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def find(kind: str, name: str) -> Path:
    """The file ``name`` if it exists, else the shipped one of that name; a bare word is the shipped one first.

    Raises:
        ConfigError: neither exists; the text names the near ones.
    """
    path = Path(name)
    shipped = folder(kind) / f"{path.stem}.yaml"
    candidates = [path]
    if str(path.parent) in (".", kind) and path.suffix in ("", ".yaml"):
        # A bare word is the shipped one, whatever lies around under that name; otherwise a file is meant.
        candidates = [shipped, path] if name == path.stem else [path, shipped]
    with contextlib.suppress(OSError):  # a name too long for a file
        for candidate in candidates:
            if candidate.is_file():
                return candidate
    known = sorted(file.stem for file in folder(kind).glob("*.yaml"))
    alike = near(path.stem, known, 3) or known
    raise ConfigError(f"{kind}: no file {name!r}; shipped ones like it: {', '.join(alike)}")
