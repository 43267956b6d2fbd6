"""Messages to bytes and back: msgpack, typed and size-capped. A decoder that accepts nothing it does not know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, FieldType, Message, wire_fields

MAX_BYTES = max(message.MAX_BYTES for message in MESSAGES.values())
"""The largest payload any message may have: what sockets are told to cut off at."""

_INTEGERS = {"u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "i64": (-(2**63), 2**63 - 1)}
MAX_SIZE = 1 << 16
"""The largest N, O, A or E, and the most elements of any list or map (msgpack allocates what its head announces)."""
MAX_DEPTH = 8
"""How deep a map field may nest."""

Dims = Mapping[str, int]


def encode(message: Message) -> bytes:
    """The payload frame of a message.

    Raises:
        ValueError: a field's array has the wrong dtype or number of dimensions (a mistake in the caller).
    """
    content: dict[str, Any] = {}
    for name, (wire, dtype) in _PLANS[type(message)].items():
        value = getattr(message, name)
        if dtype is not None:
            if value.dtype != dtype or value.ndim != len(wire.shape):
                raise ValueError(f"{message.NAME}.{name}: {value.dtype}{list(value.shape)} is not {wire.dtype}")
            value = value.tobytes()
        content[name] = value
    packed: bytes = msgpack.packb(content)
    return packed


def decode(name: str, payload: bytes, dims: Dims | None = None) -> Message:
    """The message of a topic name and its payload frame.

    ``dims`` gives the sizes N, O, A where they are known (after a handshake); others follow from the first array that
    has them, and must agree among the arrays of the message. Arrays are read-only views of the payload.

    Raises:
        ProtocolError: with ``kind`` one of unknown-topic, oversize, malformed, fields, type, range, shape, value.
    """
    message = MESSAGES.get(name)
    if message is None:
        raise ProtocolError("unknown-topic", f"topic {name[:40]!r} is not one of {', '.join(MESSAGES)}")
    if len(payload) > message.MAX_BYTES:
        raise ProtocolError("oversize", f"{name}: {len(payload)} bytes, above the limit of {message.MAX_BYTES}")
    try:
        content = msgpack.unpackb(
            payload, strict_map_key=True, max_ext_len=0, max_array_len=MAX_SIZE, max_map_len=MAX_SIZE
        )
    except Exception as error:  # msgpack raises a dozen unrelated types for bytes that are not msgpack
        raise ProtocolError("malformed", f"{name}: not msgpack ({type(error).__name__})") from None
    plan = _PLANS[message]
    if not isinstance(content, dict) or content.keys() != plan.keys():
        keys = sorted(str(key)[:40] for key in content)[:20] if isinstance(content, dict) else type(content).__name__
        raise ProtocolError("fields", f"{name}: has {keys}, needs exactly {sorted(plan)}")
    known = dict(dims) if dims else {}
    for key, (wire, dtype) in plan.items():
        label = f"{name}.{key}"
        if dtype is None:
            _CHECKS[wire.kind](label, content[key], wire)
        else:
            content[key] = _array(label, content[key], wire, dtype, known)
    result = message(**content)
    if problem := result.problem():
        raise ProtocolError("value", f"{name}: {problem}")
    return result


def source_of(payload: bytes) -> str:
    """The field ``source`` of a payload; empty if there is none. For readers that have to find its sizes first."""
    try:
        content = msgpack.unpackb(
            payload, strict_map_key=True, max_ext_len=0, max_array_len=MAX_SIZE, max_map_len=MAX_SIZE
        )
    except Exception:  # as in decode, which will say what is wrong
        return ""
    source = content.get("source") if isinstance(content, dict) else None
    return source if isinstance(source, str) else ""


def _array(label: str, value: Any, wire: FieldType, dtype: np.dtype[Any], dims: dict[str, int]) -> Any:
    if type(value) is not bytes:
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs bin")
    count, rest = divmod(len(value), dtype.itemsize)
    for size in wire.shape:
        if size not in dims:  # only the last unknown size of an array can follow from its length
            others = math.prod(dims.get(other, 1) for other in wire.shape if other != size)
            dims[size] = count // max(others, 1)
    shape = tuple(dims[size] for size in wire.shape)
    if rest or math.prod(shape) != count or max(shape) > MAX_SIZE or min(shape) < 1:
        sizes = " × ".join(f"{size}={dims[size]}" for size in wire.shape)
        raise ProtocolError("shape", f"{label}: {len(value)} bytes is not {wire.dtype} of {sizes}")
    return np.frombuffer(value, dtype).reshape(shape)


def _integer(label: str, value: Any, wire: FieldType) -> None:
    low, high = _INTEGERS[wire.kind]
    if type(value) is not int:
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs an integer")
    if not low <= value <= high:
        raise ProtocolError("range", f"{label}: {value} is not in [{low}, {high}]")


def _text(label: str, value: Any, wire: FieldType) -> None:
    if type(value) is not str:
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs text")
    if len(value) > wire.limit:
        raise ProtocolError("range", f"{label}: {len(value)} characters, above {wire.limit}")


def _bytes(label: str, value: Any, wire: FieldType) -> None:
    if type(value) is not bytes:
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs bin")
    if len(value) > wire.limit:
        raise ProtocolError("range", f"{label}: {len(value)} bytes, above {wire.limit}")


def _tree(label: str, value: Any, wire: FieldType, depth: int = 0) -> None:
    """A map of text, numbers, maps and lists; its size is capped with the whole message's."""
    if depth == 0 and not isinstance(value, dict):
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs a map")
    if depth > MAX_DEPTH:
        raise ProtocolError("range", f"{label}: nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise ProtocolError("type", f"{label}: key of type {type(key).__name__}, needs text")
            _tree(label, item, wire, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _tree(label, item, wire, depth + 1)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ProtocolError("type", f"{label}: holds {type(value).__name__}, needs text, numbers, maps and lists")


_CHECKS: dict[str, Callable[[str, Any, FieldType], None]] = {
    "u32": _integer,
    "u64": _integer,
    "i64": _integer,
    "text": _text,
    "bytes": _bytes,
    "map": _tree,
}

_PLANS: dict[type[Message], dict[str, tuple[FieldType, np.dtype[Any] | None]]] = {
    message: {
        name: (wire, np.dtype(wire.dtype) if wire.kind == "array" else None)
        for name, wire in wire_fields(message).items()
    }
    for message in MESSAGES.values()
}
