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
"""How deep a field of kind map may nest; one of kind list, which holds such maps, three levels more."""

_LAYOUTS = 256  # combinations of sizes a plan remembers

Dims = Mapping[str, int]
Buffer = bytes | memoryview
"""A frame; a long one is seen where it was received, and not copied."""


def encode(message: Message) -> bytes:
    """The payload frame of a message.

    Raises:
        ValueError: a field's array has the wrong dtype or number of dimensions (a mistake in the caller).
    """
    content: dict[str, Any] = {}
    for name, (wire, dtype) in _PLANS[type(message)].fields.items():
        value = getattr(message, name)
        if dtype is not None:
            if value.dtype != dtype or value.ndim != len(wire.shape):
                raise ValueError(f"{message.NAME}.{name}: {value.dtype}{list(value.shape)} is not {wire.dtype}")
            value = value.tobytes()
        content[name] = value
    packed: bytes = msgpack.packb(content)
    return packed


def kind_of(name: str, size: int) -> type[Message]:
    """What a topic name and the size of a payload in bytes say, before anything is unpacked.

    Raises:
        ProtocolError: with ``kind`` unknown-topic or oversize.
    """
    message = MESSAGES.get(name)
    if message is None:
        raise ProtocolError("unknown-topic", f"topic {name[:40]!r} is not one of {', '.join(MESSAGES)}")
    if size > message.MAX_BYTES:
        raise ProtocolError("oversize", f"{name}: {size} bytes, above the limit of {message.MAX_BYTES}")
    return message


def decode(name: str, payload: Buffer, dims: Dims | None = None) -> Message:
    """The message of a topic name and its payload frame.

    ``dims`` gives the sizes N, O, A where they are known (after a handshake); others follow from the first array that
    has them, and must agree among the arrays of the message. Arrays are read-only views of the payload.

    Raises:
        ProtocolError: with ``kind`` one of unknown-topic, oversize, malformed, fields, type, range, shape, value.
    """
    message = kind_of(name, len(payload))
    try:
        content = msgpack.unpackb(
            payload, strict_map_key=True, max_ext_len=0, max_array_len=MAX_SIZE, max_map_len=MAX_SIZE
        )
    except Exception as error:  # msgpack raises a dozen unrelated types for bytes that are not msgpack
        raise ProtocolError("malformed", f"{name}: not msgpack ({type(error).__name__})") from None
    plan = _PLANS[message]
    if not isinstance(content, dict) or content.keys() != plan.fields.keys():
        keys = sorted(str(key)[:40] for key in content)[:20] if isinstance(content, dict) else type(content).__name__
        raise ProtocolError("fields", f"{name}: has {keys}, needs exactly {sorted(plan.fields)}")
    for key, low, high, wire in plan.integers:
        value = content[key]
        if type(value) is not int or not low <= value <= high:
            _integer(f"{name}.{key}", value, wire)
    for key, wire in plan.others:
        _CHECKS[wire.kind](f"{name}.{key}", content[key], wire)
    if plan.arrays and not _take_arrays(content, plan.layout(dims)):
        known = dict(dims) if dims else {}
        for key, wire, dtype in plan.arrays:
            content[key] = _array(f"{name}.{key}", content[key], wire, dtype, known)
    result: Message = object.__new__(message)
    result.__dict__.update(content)  # a frozen dataclass's own constructor sets fields one by one, ten times slower
    if problem := result.problem():
        raise ProtocolError("value", f"{name}: {problem}")
    return result


Layout = list[tuple[str, tuple[int, ...], np.dtype[Any], int]]


class _Plan:
    """How to encode and decode one message; what can be worked out once is."""

    def __init__(self, message: type[Message]) -> None:
        self.fields = {
            name: (wire, np.dtype(wire.dtype) if wire.kind == "array" else None)
            for name, wire in wire_fields(message).items()
        }
        scalars = [(name, wire) for name, (wire, dtype) in self.fields.items() if dtype is None]
        self.integers = [(name, *_INTEGERS[wire.kind], wire) for name, wire in scalars if wire.kind in _INTEGERS]
        self.others = [(name, wire) for name, wire in scalars if wire.kind not in _INTEGERS]
        self.arrays = [(name, wire, dtype) for name, (wire, dtype) in self.fields.items() if dtype is not None]
        self._sizes = sorted({size for _, wire, _ in self.arrays for size in wire.shape})
        self._layouts: dict[tuple[int | None, ...], Layout | None] = {}

    def layout(self, dims: Dims | None) -> Layout | None:
        """Name, shape, dtype and bytes of each array; None where ``dims`` does not say all sizes."""
        key = tuple(map(dims.get, self._sizes)) if dims else ()
        try:
            return self._layouts[key]
        except KeyError:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = None
            if dims and None not in key:
                layout = [
                    (name, shape, dtype, dtype.itemsize * math.prod(shape))
                    for name, wire, dtype in self.arrays
                    for shape in [tuple(dims[size] for size in wire.shape)]
                ]
            self._layouts[key] = layout
            return layout


def _take_arrays(content: dict[str, Any], layout: Layout | None) -> bool:
    """Replace bytes by arrays if all are as long as they must be; else False, and somebody else finds out why."""
    if layout is None:
        return False
    for name, _, _, size in layout:
        value = content[name]
        if type(value) is not bytes or len(value) != size:
            return False
    for name, shape, dtype, _ in layout:
        content[name] = np.ndarray(shape, dtype, content[name])
    return True


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


def _number(label: str, value: Any, wire: FieldType) -> None:
    del wire
    if type(value) is not float:
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs a float")
    if not math.isfinite(value):
        raise ProtocolError("range", f"{label}: {value} is not finite")


def _tree(label: str, value: Any, wire: FieldType, depth: int = 0) -> None:
    """A map or list of text, numbers, maps and lists; its size is capped with the whole message's."""
    if depth == 0 and not isinstance(value, dict if wire.kind == "map" else list):
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs a {wire.kind}")
    deepest = MAX_DEPTH + 3 * (wire.kind == "list")
    if depth > deepest:
        raise ProtocolError("range", f"{label}: nested deeper than {deepest}")
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
    "text": _text,
    "bytes": _bytes,
    "f64": _number,
    "map": _tree,
    "list": _tree,
}

_PLANS: dict[type[Message], _Plan] = {message: _Plan(message) for message in MESSAGES.values()}
