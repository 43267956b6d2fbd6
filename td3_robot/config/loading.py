"""Read a configuration from YAML, apply overrides, and explain errors in one line."""

from __future__ import annotations

import contextlib
import logging
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
from td3_robot.util.text import similar

log = logging.getLogger(__name__)

RENAMED: dict[str, str] = {}
"""Old full name of a key or section, mapped to its new name, for example ``learner.tau`` to ``learner.polyak``."""
REPLACED: dict[tuple[str, str], dict[str, Any]] = {
    ("launch", "a2c"): {
        "launch": "train",
        "learner.algorithm": "a2c",
        "learner.learning_starts": 0,
        "timing": "lockstep",
    }
}
"""A top-level key with an old value, mapped to the keys (full names) and values that replace it."""
_LONGEST = 1 << 22  # bytes of a file


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration from a YAML file or a shipped one by its name, and apply overrides.

    Args:
        path: of the file, or the name of a shipped configuration.
        overrides: each as ``KEY=VALUE``, for example ``learner.batch_size=128``.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a valid configuration.
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
    """Make a configuration from plain maps, and apply overrides.

    Args:
        content: nested maps, as read from YAML.
        overrides: each as ``KEY=VALUE``, for example ``learner.batch_size=128``.
        source: name of the input in errors and warnings.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or two values contradict each other.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source}: the top level is {type(content).__name__}; it must be a map of keys")
    try:
        tree = _copy(content)
    except RecursionError:
        raise ConfigError(f"{source}: a key contains itself; YAML anchors must not make a circle") from None
    _rename(tree, source)
    _replace(tree, source)
    for override in overrides:
        _override(tree, override)
    _replace(tree, "--set")
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


def current_name(key: str) -> str:
    """Return the present full name of a key, from its present or old full name."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return key


def _copy(node: Any) -> Any:
    return {key: _copy(value) for key, value in node.items()} if isinstance(node, Mapping) else node


def _rename(tree: dict[str, Any], source: str) -> None:
    """Move values from old key names to the new names, with a warning for each."""
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        sections = [tree]
        for part in path:
            inner = sections[-1].get(part)
            sections.append(inner if isinstance(inner, dict) else {})
        if last not in sections[-1]:
            continue
        value = sections[-1].pop(last)
        for part, outer, inner in reversed(list(zip(path, sections, sections[1:], strict=False))):
            if not inner:  # the section may have been removed
                del outer[part]
        if not _put(tree, new, value, replace=False):
            raise ConfigError(f"{source}: {old} is the old name of {new}, and {new} is set too; keep {new} alone")
        log.warning("%s: the key %s is now called %s", source, old, new)


def _replace(tree: dict[str, Any], source: str) -> None:
    """Replace old values as ``REPLACED`` says, with a warning for each."""
    for (key, old), values in REPLACED.items():
        if tree.get(key) == old:
            for name, value in values.items():
                if not _put(tree, name, value):
                    raise ConfigError(f"{source}: {name.rpartition('.')[0]!r} is a value, not a section")
            now = ", ".join(f"{name}: {value}" for name, value in values.items())
            log.warning("%s: %s: %s is now %s", source, key, old, now)


def _put(tree: dict[str, Any], key: str, value: Any, *, replace: bool = True) -> bool:
    """Set a key by its full name, and return True.

    Return False if a part of the name is a value and no section, or if the key is set and ``replace`` is False.
    """
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return False
    if last in tree and not replace:
        return False
    tree[last] = value
    return True


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: expected KEY=VALUE, for example learner.batch_size=128")
    try:
        value = resources.read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {' '.join(str(error).split())}") from None
    if (name := current_name(key)) != key:
        log.warning("--set %s: the key %s is now called %s", override, key, name)
    if not _put(tree, name, value):
        raise ConfigError(f"--set {override!r}: {name.rpartition('.')[0]!r} is a value, not a section")


def _refuse_unknown(tree: Mapping[Any, Any], section: type[Struct], source: str, prefix: str = "") -> None:
    hints = get_type_hints(section)
    for key, value in tree.items():
        if key not in hints:
            alike = similar(str(key), hints) or _elsewhere(str(key))
            hint = f"did you mean {alike[0]!r}?" if alike else f"known keys: {', '.join(hints)}"
            raise ConfigError(f"{source}: unknown key {prefix + str(key)!r}; {hint}")
        inner = hints[key]
        if isinstance(inner, type) and issubclass(inner, Section):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {prefix + key} is {value!r}; it must be a map of keys")
            _refuse_unknown(value, inner, source, f"{prefix}{key}.")


def _elsewhere(key: str) -> list[str]:
    """Return the full names of similar keys in all sections."""
    names = {name: f"{section}.{name}" for section, inner in _sections().items() for name in get_type_hints(inner)}
    return [names[name] for name in similar(key, names, alike=0.7)]  # stricter, because there are many names


def _sections() -> dict[str, type[Struct]]:
    hints = get_type_hints(Config)
    return {name: inner for name, inner in hints.items() if isinstance(inner, type) and issubclass(inner, Section)}


def _readable(text: str, tree: Mapping[str, Any]) -> str:
    """Turn an error of msgspec, ``Expected … - at `$.a.b```, into a line with key, value and allowed values."""
    reason, at, where = text.partition(" - at `$")
    if not at:
        return text
    keys = where.rstrip("`").lstrip(".").split(".") if where.rstrip("`") else []
    value: Any = tree
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", where):
        with contextlib.suppress(KeyError, IndexError, TypeError):
            value = value[name] if name else value[int(index)]
    if isinstance(value, Mapping) and not reason.startswith(("Expected", "Object")):
        return reason  # the section's own check, which names the key
    return f"{'.'.join(keys)} is {value!r}: {reason[0].lower()}{reason[1:]}{_choices(keys)}" if keys else reason


def _choices(keys: Sequence[str]) -> str:
    """Return the allowed values of a key as text for its error; empty if the key has no fixed set of values."""
    section: Any = Config
    for key in keys[:-1]:
        section = _sections().get(key, Config)
    hint = get_type_hints(section).get(keys[-1].split("[")[0])
    kinds = [hint] if get_origin(hint) is Literal else get_args(hint)  # a union may hold choices
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    return f"; allowed: {', '.join(choices)}" if choices else ""
