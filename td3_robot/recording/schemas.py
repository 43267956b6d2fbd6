"""Makes a JSON Schema from the declaration of each message. MCAP viewers read the schemas.

In a message, arrays and byte strings have the msgpack type ``bin``. JSON has no such type, so the schema describes them
as binary strings. For an array, the schema also gives dtype and shape.
"""

from __future__ import annotations

import json

import msgspec

from td3_robot.messages import Message, wire_fields

ENCODING = "jsonschema"


def schema(message: type[Message]) -> bytes:
    """The JSON Schema of a message, as UTF-8."""
    (described,) = msgspec.json.schema(message)["$defs"].values()
    for name, wire in wire_fields(message).items():
        field = described["properties"][name]
        field["description"] = wire.meaning
        if wire.unit:
            field["unit"] = wire.unit
        if wire.kind == "array":
            field |= {"contentEncoding": "binary", "dtype": wire.dtype, "shape": list(wire.shape)}
        elif wire.kind == "bytes":  # msgspec wrote the contentEncoding "base64"
            field |= {"contentEncoding": "binary", "maxLength": wire.limit}
    described["title"] = message.NAME
    described["description"] = " ".join((message.__doc__ or "").split())
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **described}).encode()
