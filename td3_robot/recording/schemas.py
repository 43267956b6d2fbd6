"""Makes a JSON Schema for each message from its declaration, for MCAP viewers.

Arrays and other bytes are msgpack ``bin``. JSON has no such type, so the schema describes them as binary strings. For
an array, it also gives dtype and shape.
"""

from __future__ import annotations

import json
from typing import Any

from td3_robot.messages import FieldType, Message, wire_fields

ENCODING = "jsonschema"
_KINDS: dict[str, dict[str, Any]] = {
    "u32": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    "u64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "i64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "f64": {"type": "number"},
    "text": {"type": "string"},
    "map": {"type": "object"},
    "list": {"type": "array"},
    "bytes": {"type": "string", "contentEncoding": "binary"},
    "array": {"type": "string", "contentEncoding": "binary"},
}


def schema(message: type[Message]) -> bytes:
    """The JSON Schema of a message, as UTF-8."""
    wires = wire_fields(message)
    return json.dumps(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": message.NAME,
            "description": " ".join((message.__doc__ or "").split()),
            "type": "object",
            "properties": {name: _property(wire) for name, wire in wires.items()},
            "required": [name for name, wire in wires.items() if not wire.optional],
        }
    ).encode()


def _property(wire: FieldType) -> dict[str, Any]:
    described = {**_KINDS[wire.kind], "description": wire.meaning}
    if wire.unit:
        described["unit"] = wire.unit
    if wire.kind == "array":
        described |= {"dtype": wire.dtype, "shape": list(wire.shape)}
    elif wire.kind in ("text", "bytes"):
        described["maxLength"] = wire.limit
    return described
