"""Read a configuration from YAML, apply overrides, and explain what is wrong in one line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Struct

from td3_robot.config.learner import IMPLIED
from td3_robot.config.schema import Config
from td3_robot.config.section import Section
from td3_robot.errors import ConfigError
from td3_robot.util import files, resources
from td3_robot.util.text import near

_LONGEST = 1 << 22  # bytes of a file


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (or the shipped configuration of that name) and apply ``a.b=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or its content is not a valid configuration.
    """
    file = resources.find("configs", str(path))
    try:
        content = resources.read_yaml(files.read(file, _LONGEST).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {str(file)!r} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"configuration {str(file)!r} is not YAML: {' '.join(str(error).split())}") from None
    return parse({} if content is None else content, overrides, source=str(file))


def parse(content: Any, overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """A configuration from plain maps, with overrides applied.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a wrong type or value, or a contradiction.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source}: the top level is {type(content).__name__}; it must be a map of keys")
    try:
        tree = _copy(content)
    except RecursionError:
        raise ConfigError(f"{source}: a key holds itself; YAML anchors must not make a circle") from None
    for override in overrides:
        _override(tree, override)
    if isinstance(tree.get("record"), bool):
        tree["record"] = {"enabled": tree["record"]}
    _refuse_unknown(tree, Config, source)
    learner = tree.get("learner", {})
    for (key, choice), implied in IMPLIED.items():
        if learner.get(key) == choice:
            tree["learner"] = learner = {**implied, **learner}
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_readable(str(error), tree)}") from None


def _copy(node: Any) -> Any:
    return {key: _copy(value) for key, value in node.items()} if isinstance(node, Mapping) else node


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: expected KEY=VALUE, for example learner.batch_size=128")
    try:
        value = resources.read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {' '.join(str(error).split())}") from None
    *path, last = key.split(".")
    node = tree
    for part in path:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
        node = child
    node[last] = value


def _refuse_unknown(tree: Mapping[Any, Any], section: type[Struct], source: str, prefix: str = "") -> None:
    hints = get_type_hints(section)
    for key, value in tree.items():
        if key not in hints:
            alike = near(str(key), hints) or _elsewhere(str(key))
            hint = f"did you mean {alike[0]!r}?" if alike else f"known keys: {', '.join(hints)}"
            raise ConfigError(f"{source}: unknown key {prefix + str(key)!r}; {hint}")
        inner = hints[key]
        if isinstance(inner, type) and issubclass(inner, Section):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {prefix + key} is {value!r}; it must be a map of keys")
            _refuse_unknown(value, inner, source, f"{prefix}{key}.")


def _elsewhere(key: str) -> list[str]:
    """The full names of keys in any section that look like ``key``."""
    names = {name: f"{section}.{name}" for section, inner in _sections().items() for name in get_type_hints(inner)}
    return [names[name] for name in near(key, names, alike=0.7)]  # of many more words


def _sections() -> dict[str, type[Struct]]:
    hints = get_type_hints(Config)
    return {name: inner for name, inner in hints.items() if isinstance(inner, type) and issubclass(inner, Section)}


def _readable(text: str, tree: Mapping[str, Any]) -> str:
    """Turn msgspec's ``Expected … - at `$.a.b``` into a line with the key, the value and what is allowed."""
    reason, at, where = text.partition(" - at `$")
    if not at:
        return text
    keys = where.rstrip("`").lstrip(".").split(".") if where.rstrip("`") else []
    value: Any = tree
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", where):
        with contextlib.suppress(KeyError, IndexError, TypeError):
            value = value[name] if name else value[int(index)]
    return f"{'.'.join(keys)} is {value!r}: {reason[0].lower()}{reason[1:]}{_choices(keys)}" if keys else reason


def _choices(keys: Sequence[str]) -> str:
    """What a choice key allows, for its error text; empty for any other kind of key."""
    section: Any = Config
    for key in keys[:-1]:
        section = _sections().get(key, Config)
    hint = get_type_hints(section).get(keys[-1].split("[")[0])
    kinds = [hint] if get_origin(hint) is Literal else get_args(hint)  # of a union, those that are a choice
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    return f"; allowed: {', '.join(choices)}" if choices else ""
