"""The base class of configuration sections, and the number types of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

Positive = Annotated[float, Meta(gt=0, le=1e12)]  # excludes infinity and NaN
Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A map of keys in the YAML file. Unknown keys are errors."""


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested maps by full key, such as ``learner.batch_size``. An empty map has no values."""
    values: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values
