"""Finds and reads YAML files: configurations and launch descriptions, shipped or written by the user.

An installed wheel has the shipped files in ``td3_robot/data``. A checkout has them in top-level folders.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import yaml

from td3_robot.errors import ConfigError
from td3_robot.util.text import similar

_PACKAGE = Path(__file__).parents[1]


def folder(kind: str) -> Path:
    """Return the folder of shipped ``configs``, ``launch``, ``policies`` or ``templates`` files."""
    installed = _PACKAGE / "data" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def find(kind: str, name: str) -> Path:
    """Find a configuration or a launch description. ``name`` is a path or the name of a shipped file.

    A name such as ``ant`` means the shipped file, if there is one. Raises ConfigError if no file is found.
    """
    path = Path(name)
    shipped = folder(kind) / f"{path.stem}.yaml"
    candidates = [path]
    if str(path.parent) in (".", kind) and path.suffix in ("", ".yaml"):
        candidates = [shipped, path] if name == path.stem else [path, shipped]
    with contextlib.suppress(OSError):  # the name is too long for a file
        for candidate in candidates:
            if candidate.is_file():
                return candidate
    known = sorted(file.stem for file in folder(kind).glob("*.yaml"))
    alike = similar(path.stem, known, 3)
    hint = (
        f"similar shipped files in {kind}: {', '.join(alike)}"
        if alike
        else f"shipped files in {kind}: {', '.join(known)}"
    )
    raise ConfigError(f"there is no file {name!r}; {hint}")


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys (PyYAML would keep the last), and reads 1e-3 as a number, as JSON and YAML 1.2 do.

    A floating-point number with an integer value becomes an integer, so that a user can write a count as 1e5.
    """

    def construct_yaml_float(self, node: Any) -> float:
        value: float = super().construct_yaml_float(node)
        return int(value) if value.is_integer() else value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        composed: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[Any] = set()
        for key, _ in composed.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value!r} appears twice in one map")
            seen.add(name)
        return composed


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """Read a YAML document as plain values. Raises YAMLError, ValueError or RecursionError if it cannot be read."""
    return yaml.load(text, _Loader)  # nosec B506 # _Loader is a SafeLoader, which makes plain values only
