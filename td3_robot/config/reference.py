"""Describes every configuration key, from the schema and its docstrings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec import inspect as schema

from td3_robot import noises
from td3_robot.config.schema import Config
from td3_robot.config.section import Section
from td3_robot.learner.algorithms import table as algorithms

_TYPES: dict[type, str] = {
    schema.IntType: "integer",
    schema.FloatType: "number",
    schema.StrType: "text",
    schema.BoolType: "boolean",
    schema.NoneType: "null",
}
_FINITE = 1e12  # a limit that only excludes infinity


class Key(NamedTuple):
    """One configuration key."""

    name: str  # full name, for example ``learner.batch_size``
    type: str  # type of the value, for example ``integer or null``
    default: str  # as JSON; ``required`` if the key has no default
    allowed: str  # the range or the choices; empty if the key has no range and no choices
    doc: str  # meaning of the key


def all_keys() -> list[Key]:
    """Return every configuration key, in the order of the schema. The keys of list items come last in their section."""
    return list(_keys(Config, ""))


def _keys(section: type[Struct], prefix: str) -> Iterator[Key]:
    info = schema.type_info(section)
    assert isinstance(info, schema.StructType)
    docs = _documented(section)
    items: list[tuple[type[Struct], str]] = []  # sections that are items of a list
    for field in info.fields:
        name, kind = prefix + field.name, field.type
        if isinstance(kind, schema.StructType) and issubclass(kind.cls, Section):
            yield from _keys(kind.cls, f"{name}.")
            continue
        if isinstance(kind, schema.VarTupleType) and isinstance(kind.item_type, schema.StructType):
            yield Key(name, "list of maps", "[]", "", docs.get(field.name, ""))
            items.append((kind.item_type.cls, f"{name}[]."))
            continue
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        shown = "required" if default is msgspec.NODEFAULT else json.dumps(msgspec.to_builtins(default))
        yield Key(name, _type(kind), shown, _names(name) or _allowed(kind), docs.get(field.name, ""))
    for item, start in items:
        yield from _keys(item, start)


def _documented(section: type[Struct]) -> dict[str, str]:
    """Return the text about each key, from the lines ``key, key: text`` in the docstring of a section."""
    _, _, attributes = (inspect.getdoc(section) or "").partition("Attributes:\n")
    docs: dict[str, str] = {}
    for keys, text in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", attributes, re.MULTILINE):
        docs |= dict.fromkeys(keys.split(", "), " ".join(text.replace("``", "").split()))
    return docs


def _type(kind: Any) -> str:
    """Return a type in words."""
    if isinstance(kind, schema.UnionType):
        return " or ".join(dict.fromkeys(_type(item) for item in kind.types))
    if isinstance(kind, schema.TupleType):
        return f"[{', '.join(_type(item) for item in kind.item_types)}]"
    if isinstance(kind, schema.VarTupleType):
        return f"list of {_type(kind.item_type)}"
    if isinstance(kind, schema.DictType):
        return f"map of {_type(kind.value_type)}"
    if isinstance(kind, schema.LiteralType) and isinstance(kind.values[0], int):
        return "integer"
    return _TYPES.get(type(kind), "text")


def _allowed(kind: Any) -> str:
    """Return the range or the choices of a type in words."""
    if isinstance(kind, schema.LiteralType):
        return ", ".join(map(str, kind.values))
    if isinstance(kind, (schema.IntType, schema.FloatType)):
        limits = {"above": kind.gt, "from": kind.ge, "to": kind.le, "to below": kind.lt}
        given = {word: limit for word, limit in limits.items() if limit not in (None, -_FINITE, _FINITE)}
        return " ".join(f"{word} {limit}" for word, limit in given.items())
    inner: tuple[Any, ...] = getattr(kind, "types", ()) or getattr(kind, "item_types", ())
    inner = inner or (getattr(kind, "item_type", None), getattr(kind, "value_type", None))
    return "; ".join(dict.fromkeys(text for item in inner if item and (text := _allowed(item))))


def _names(key: str) -> str:
    """Return the allowed values of a key whose value is an algorithm or a kind of noise; empty for all other keys."""
    if key == "learner.algorithm":
        return ", ".join(algorithms.ALGORITHMS.names())
    if key == "exploration.kind":
        return ", ".join(name for name in noises.NOISES.names() if name not in noises.CHOSEN_BY_THE_LEARNER)
    return ""
