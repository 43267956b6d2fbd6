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

from td3_robot.config.learner import IMPLIED
from td3_robot.config.schema import Config
from td3_robot.config.section import Section
from td3_robot.errors import ConfigError
from td3_robot.util import files, resources
from td3_robot.util.text import similar

log = logging.getLogger(__name__)

_LAUNCH_A2C = {"launch": "train", "learner.algorithm": "a2c", "learner.learning_starts": 0, "timing": "lockstep"}
"""The keys and values that replace ``launch: a2c``, which version 0.1.0 wrote."""
_LONGEST = 1 << 22  # bytes of a file


def load(path: str | Path, overrides: Sequence[str] = (), flags: Mapping[str, str] | None = None) -> Config:
    """Read a configuration from a YAML file, and apply overrides.

    Args:
        path: path of the file, or name of a shipped configuration.
        overrides, flags: see :func:`parse`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a valid configuration.
    """
    file = resources.find("configs", str(path))
    try:
        text = files.read(file, _LONGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {str(file)!r} cannot be read: {error}") from None
    content = _yaml(text, f"configuration {str(file)!r}")
    return parse({} if content is None else content, overrides, str(file), flags)


def parse(
    content: Any,
    overrides: Sequence[str] = (),
    source: str = "configuration",
    flags: Mapping[str, str] | None = None,
) -> Config:
    """Make a configuration from plain maps, and apply overrides.

    Args:
        content: nested maps, as read from YAML.
        overrides: each as ``KEY=VALUE``, for example ``learner.batch_size=128``. A map for a section changes only the
            keys in the map, for example ``learner={batch_size: 128}``.
        source: name of the input in errors and warnings. An error about an overridden key does not contain this name.
            It contains the override, or the option that ``flags`` gives for the key.
        flags: maps the full name of an overridden key to the command-line option that set this key. For all other
            overridden keys, the option is ``--set``.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or two values contradict each other.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source}: the top level is {type(content).__name__}; it must be a map of keys")
    try:
        tree = _copy(content)
    except RecursionError:
        raise ConfigError(f"{source}: a key contains itself; YAML anchors must not make a circle") from None
    flags = flags or {}
    if isinstance(enabled := tree.get("record"), bool):  # the short form ``record: true``
        tree["record"] = {"enabled": enabled}
    _replace_launch_a2c(tree, source)
    for override in overrides:
        _override(tree, override, flags)
    _replace_launch_a2c(tree, "--set")
    learner = tree.get("learner", {})
    for (key, choice), implied in IMPLIED.items():
        if isinstance(learner, dict) and learner.get(key) == choice:
            tree["learner"] = learner = {**implied, **learner}
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        text = _readable(str(error), tree)
        culprits = _culprits(text, overrides, flags) or source
        raise ConfigError(text if text.startswith(f"{culprits} is ") else f"{culprits}: {text}") from None


def keys_of(override: str) -> list[str]:
    """Return the full names of the keys that an override sets. A map for a section sets the keys in the map.

    If the value is not YAML, return the key of the override.
    """
    key, _, text = override.partition("=")
    with contextlib.suppress(ConfigError):
        return _keys(key, _yaml(text, key))
    return [key]


def _keys(key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and _is_section(_kind(key)):
        return [inner for name, item in value.items() for inner in _keys(f"{key}.{name}", item)]
    return [_full_name(key, value)]


def _full_name(key: str, value: Any) -> str:
    """Return the full name of a key. ``record=true`` sets the key ``record.enabled``."""
    return "record.enabled" if key == "record" and isinstance(value, bool) else key


def _culprits(text: str, overrides: Sequence[str], flags: Mapping[str, str]) -> str:
    """Return the options that set the keys in the error text, or an empty text if no override set such a key."""
    options: dict[str, str] = {}
    for override in overrides:
        whole = override.partition("=")[0]
        options |= dict.fromkeys(keys_of(override) or [whole], flags.get(whole, f"--set {override}"))
    named = [options[key] for key in options if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text)]
    return ", ".join(dict.fromkeys(named))


def _copy(node: Any) -> Any:
    return {str(key): _copy(value) for key, value in node.items()} if isinstance(node, Mapping) else node


def _replace_launch_a2c(tree: dict[str, Any], source: str) -> None:
    if tree.get("launch") == "a2c":
        for key, value in _LAUNCH_A2C.items():
            _put(tree, key, value, source)
        now = ", ".join(f"{key}: {value}" for key, value in _LAUNCH_A2C.items())
        log.warning("%s: replaced 'launch: a2c' with '%s'", source, now)


def _put(tree: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set a key by its full name. If the key is a section, a map changes only the keys in the map."""
    section, _, _ = key.rpartition(".")
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{source}: {section!r} is a value, not a section")
    _merge(tree, {last: value}, _kind(section) if section else Config)


def _merge(old: dict[str, Any], new: Mapping[str, Any], section: Any) -> None:
    """Put the keys of a map into a section and its inner sections. A map for another key replaces the value."""
    kinds = get_type_hints(section) if _is_section(section) else {}
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict) and _is_section(kinds.get(name)):
            _merge(old[name], value, kinds[name])
        else:
            old[name] = value


def _override(tree: dict[str, Any], override: str, flags: Mapping[str, str]) -> None:
    key, equals, text = override.partition("=")
    source = flags.get(key, f"--set {override!r}")
    if not equals or not key:
        raise ConfigError(f"{source}: expected KEY=VALUE, for example learner.batch_size=128")
    value = _yaml(text, f"{source}: the value")
    _put(tree, _full_name(key, value), value, source)


def _yaml(text: str, where: str) -> Any:
    try:
        return resources.read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from None


_PLAIN = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a map of keys",
}
"""Maps msgspec's names of types to the words in errors."""


def _readable(text: str, tree: Mapping[str, Any]) -> str:
    """Return an error of msgspec as a line with key, value and allowed values.

    ``text`` is the error of msgspec, for example "Expected `int`, got `str` - at `$.a.b`".
    """
    reason, _, place = text.partition(" - at `$")
    name = place.strip("`.")
    value: Any = tree
    kind: Any = Config
    for part in re.findall(r"\w+", name):
        with contextlib.suppress(KeyError, IndexError, TypeError):
            value = value[int(part) if isinstance(value, list) else part]
        kind = get_type_hints(kind)[part] if _is_section(kind) else next(iter(get_args(kind)), kind)
    if unknown := re.match("Object contains unknown field `(.*)`", reason):
        return _unknown(unknown[1], kind, name)
    if lacking := re.match("Object missing required field `(.*)`", reason):
        return f"{name} has no {lacking[1]!r}, which is required"
    if reason.startswith("Expected `object`") and _is_section(kind):
        short = "true, false or " if name == "record" else ""
        return f"{name} is {value!r}; it must be {short}a map of keys"
    if _is_section(kind):
        return reason  # the error of the section's own check already contains the key
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]  # ``kind`` may be a union
    choices = [str(choice) for literal in literals for choice in get_args(literal)]
    allowed = f"; allowed: {', '.join(choices)}" if choices else ""
    if not reason.startswith("Expected "):
        return f"{name} is {value!r}: {reason[0].lower()}{reason[1:]}{allowed}"
    needed = re.sub(r", got `.*`$", "", reason.removeprefix("Expected "))
    needed = re.sub(
        r"`(.*?)`", lambda found: " or ".join(_PLAIN.get(kind, kind) for kind in found[1].split(" | ")), needed
    )
    return f"{name} is {value!r}; it must be {needed}{allowed}"


def _unknown(key: str, section: type[Section], name: str) -> str:
    """Return the error for an unknown key. It suggests a similar key of this section, or else of all sections."""
    known = get_type_hints(section)
    sections = {outer: inner for outer, inner in get_type_hints(Config).items() if _is_section(inner)}
    others = {inner: f"{outer}.{inner}" for outer, kind in sections.items() for inner in get_type_hints(kind)}
    # The search in all sections is stricter, because there are many names.
    alike = similar(key, known) or [others[other] for other in similar(key, others, alike=0.7)]
    hint = f"did you mean {alike[0]!r}?" if alike else f"known keys: {', '.join(known)}"
    return f"unknown key {f'{name}.{key}'.lstrip('.')!r}; {hint}"


def _kind(key: str) -> Any:
    """Return the type of a key, which may be a section; None if there is no such key."""
    kind: Any = Config
    for part in key.split("."):
        kind = get_type_hints(kind).get(part) if _is_section(kind) else None
    return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
