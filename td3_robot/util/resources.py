"""Finds and reads YAML: the configurations and launch descriptions that travel with the package, and a person's own.

In a wheel they lie in ``td3_robot/data``; in a checkout, in the top-level folders of the same names.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import yaml

from td3_robot.errors import ConfigError
from td3_robot.util.text import near

_PACKAGE = Path(__file__).parents[1]


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


class _Loader(yaml.SafeLoader):
    """Refuses a key that a map has twice, of which YAML's own readers silently drop the first. Takes 1e-3 for a number,
    as JSON and YAML 1.2 do, and a number without a fraction for a whole one, so that 1e5 may be a count."""

    def construct_yaml_float(self, node: Any) -> float:
        value: float = super().construct_yaml_float(node)
        return int(value) if value.is_integer() else value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        composed: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[Any] = set()
        for key, _ in composed.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice in one map")
            seen.add(name)
        return composed


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """What a YAML document says, as plain values.

    Raises:
        yaml.YAMLError: it is no YAML, or a map has a key twice.
        ValueError, RecursionError: a value in it cannot be understood.
    """
    return yaml.load(text, _Loader)
