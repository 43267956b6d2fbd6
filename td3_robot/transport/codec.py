"""Encodes messages as msgpack, and decodes them. Limits their types and sizes.

msgspec checks types and bounds of the fields while it decodes. This module also checks arrays, and the values inside
maps and lists.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, ZEROS, Message, Record, wire_fields
from td3_robot.util.arrays import finite

MAX_BYTES = max(message.MAX_BYTES for message in MESSAGES.values())
"""Largest payload of any message, in bytes."""
MAX_SIZE = 1 << 16
"""Each of N (robots), O (observations), A (actions) and E (episodes) is at most MAX_SIZE. A list or map has at most
MAX_SIZE elements."""
MAX_PARTS = 1 << 12
"""The maximum number of maps and lists in a field of kind ``map``. It limits the time to check them.

In a field of kind ``list`` the maximum is MAX_SIZE.
"""
MAX_DEPTH = 8
"""Maximum depth of nested maps and lists in a field of kind ``map``.

A field of kind ``list`` may be three levels deeper, because a Turn holds maps of other messages three levels down.
"""
MOST_RECORDS = 256
"""The maximum number of Records in one payload."""

_SIMPLE = frozenset({str, int, float, bool, type(None)})  # the leaves of maps and lists
_LAYOUTS = 256  # maximum number of combinations of sizes that a plan remembers
_LONGEST_TEXT = 200  # maximum number of characters of msgspec's error text in a ProtocolError

Dims = Mapping[str, int]
Buffer = bytes | memoryview
"""A frame. A long frame is a view of the received bytes, not a copy."""
Frames = Sequence[Buffer]
"""The frames of one message: topic and payload."""
MOST_FRAMES = 3
"""The maximum number of frames to keep. A valid message has two frames, so a message with a third frame is invalid."""


def encode(message: Message) -> bytes:
    """The payload frame of a message.

    Raises:
        ValueError: a field's array has the wrong dtype or number of dimensions (a mistake in the caller).
        TypeError: a value has a type that no message can hold (a mistake in the caller).
    """
    plan = _PLANS[type(message)]
    if plan.arrays:
        for value, (name, dtype, sizes) in zip(plan.contents(message), plan.arrays):  # noqa: B905
            # Comparing identities first saves time: it is faster than comparing dtypes.
            if value is ZEROS or ((value.dtype is dtype or value.dtype == dtype) and value.ndim == len(sizes)):
                continue
            raise ValueError(
                f"{message.NAME}.{name} has dtype {value.dtype.str} and shape {list(value.shape)}; "
                f"allowed: dtype {dtype.str}, number of dimensions {len(sizes)}"
            )
    try:
        return _pack(message)
    except TypeError:
        return _pack_with_numbers(message)


def kind_of(frames: Frames) -> type[Message]:
    """The type of a message, by its topic, without unpacking the payload.

    Raises:
        ProtocolError: its ``kind`` is frames, unknown-topic or oversize.
    """
    if len(frames) != 2:
        number = len(frames) if len(frames) < MOST_FRAMES else f"{MOST_FRAMES} or more"
        raise ProtocolError("frames", f"{number} frames; a message has two: topic and payload")
    return _kind(bytes(frames[0][:64]).decode("ascii", "replace"), len(frames[1]))


def _kind(name: str, size: int) -> type[Message]:
    message = MESSAGES.get(name)
    if message is None:
        raise ProtocolError("unknown-topic", f"topic {name[:40]!r} is not one of {', '.join(MESSAGES)}")
    if size > message.MAX_BYTES:
        raise ProtocolError("oversize", f"{name}: {size} bytes, above the limit of {message.MAX_BYTES}")
    return message


def decode(name: str, payload: Buffer, dims: Dims | None = None) -> Message:
    """Decode a message from its topic name and payload frame. Arrays in the payload become read-only arrays.

    Args:
        dims: sizes that a handshake fixed, by letter (N, O, A). If a letter is not in ``dims``, the first array with
            this letter determines the size for this letter. In all arrays, a letter must stand for the same size.

    Raises:
        ProtocolError: its ``kind`` is unknown-topic, oversize, malformed, fields, shape or value.
    """
    return decode_as(_kind(name, len(payload)), payload, dims)


def decode_as(message: type[Message], payload: Buffer, dims: Dims | None = None) -> Message:
    """Like :func:`decode`, for a type that :func:`kind_of` returned."""
    name, plan = message.NAME, _PLANS[message]
    try:
        result = plan.unpack(payload)
    except msgspec.ValidationError as error:
        raise ProtocolError("fields", f"{name}: {str(error)[:_LONGEST_TEXT]}") from None
    except Exception as error:  # for invalid bytes, msgspec raises exceptions of many unrelated types
        raise ProtocolError("malformed", f"{name}: not msgpack: {str(error)[:_LONGEST_TEXT]}") from None
    for key, deepest, most in plan.trees:
        if tree := getattr(result, key):
            _check_tree(f"{name}.{key}", tree, deepest, most)
    for key in plan.numbers:
        if not math.isfinite(getattr(result, key)):
            raise ProtocolError("value", f"{name}: {key} is not finite")
    if plan.arrays:
        _take_arrays(result, plan, dims)
    if problem := result.problem():
        raise ProtocolError("value", f"{name}: {problem}")
    return result


def extra_fields(message: type[Message], payload: Buffer) -> int:
    """Count the unknown fields of a decoded payload: the fields that this version does not have."""
    first = payload[0]
    # The first byte of a fixmap contains the size. In map 16 and map 32, the size follows the first byte.
    width = 0 if first < 0x90 else 2 if first == 0xDE else 4
    count = int.from_bytes(payload[1 : 1 + width], "big") if width else first & 0x0F
    plan = _PLANS[message]
    if count == plan.required:
        return 0  # most payloads have exactly the required fields, so their names need no check
    try:
        return len(_unpack_names(payload).keys() - plan.names)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # a name is a number or not valid text
        return max(1, count - len(plan.names))


def encode_records(records: Sequence[Record]) -> bytes:
    """The payload frame of an array of up to MOST_RECORDS Records."""
    return _pack(records)


def decode_records(payload: Buffer) -> list[Message]:
    """The Records of a payload frame: one Record, or an array of them. One bad Record raises ProtocolError."""
    parts: Sequence[Any]
    try:
        parts = _split(payload)
    except (msgspec.MsgspecError, RecursionError):  # one Record, or malformed bytes; decode distinguishes these cases
        parts = [payload]
    return [decode(Record.NAME, memoryview(part)) for part in parts]


def source_of(payload: bytes) -> str:
    """The field ``source`` of a payload; empty without this field.

    A recording has no handshake, so its decoder looks up the ``dims`` by source.
    """
    try:
        return _unpack_source(payload).source
    except Exception:  # decode raises the right error later
        return ""


class _Source(msgspec.Struct):
    source: str = ""


class _Plan:
    """How to encode and decode one message, prepared once.

    Attributes:
        arrays: for each array: its name, the type of its numbers, and the letters of its shape.
        trees: for each map and list: its name, and the allowed depth and number of parts.
        floats: indices of the arrays of floating-point numbers. All these arrays have the dtype ``self.float``.
        optional: indices of the arrays with a default.
        layouts: known shapes of the arrays. A key holds the lengths of the arrays and the sizes from the handshake.
    """

    def __init__(self, message: type[Message]) -> None:
        fields = wire_fields(message)
        arrays = {name: wire for name, wire in fields.items() if wire.kind == "array"}
        self.names = fields.keys()
        self.required = sum(not wire.optional for wire in fields.values())
        self.arrays = [(name, np.dtype(wire.dtype), wire.shape) for name, wire in arrays.items()]
        limits = {"map": (MAX_DEPTH, MAX_PARTS), "list": (MAX_DEPTH + 3, MAX_SIZE)}
        self.trees = [(name, *limits[wire.kind]) for name, wire in fields.items() if wire.kind in limits]
        self.numbers = [name for name, wire in fields.items() if wire.kind == "f64"]
        self.floats = [index for index, (_, dtype, _) in enumerate(self.arrays) if dtype.kind == "f"]
        self.float = self.arrays[self.floats[0]][1] if self.floats else None
        assert all(self.arrays[index][1] == self.float for index in self.floats)
        self.optional = {index for index, wire in enumerate(arrays.values()) if wire.optional}
        self.contents = _getter(list(arrays))
        self.unpack = msgspec.msgpack.Decoder(message).decode
        self.layouts: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}


def _getter(names: Sequence[str]) -> Callable[[Message], tuple[Any, ...]]:
    """A function that reads these fields of a message. The fields hold arrays, or bytes right after unpacking."""
    read = operator.attrgetter(*names) if names else lambda _: ()
    return (lambda message: (read(message),)) if len(names) == 1 else read


def _take_arrays(message: Message, plan: _Plan, dims: Dims | None) -> None:
    """Replace the bytes in a message by arrays."""
    contents = plan.contents(message)
    key = (*dims.items(), *map(len, contents)) if dims else tuple(map(len, contents))
    layout = plan.layouts.get(key)
    if layout is None:
        layout = _layout(message.NAME, plan, contents, dims or {})
        if len(plan.layouts) >= _LAYOUTS:
            plan.layouts.clear()
        plan.layouts[key] = layout
    if plan.floats:  # one check of all arrays together is faster than one check for each array
        numbers = b"".join([contents[index] for index in plan.floats])
        if not finite(np.frombuffer(numbers, plan.float)):
            wrong = (index for index in plan.floats if not finite(np.frombuffer(contents[index], plan.float)))
            raise ProtocolError("value", f"{message.NAME}: {plan.arrays[next(wrong)][0]} is not finite")
    for content, (name, dtype, _), shape in zip(contents, plan.arrays, layout):  # noqa: B905
        _set(message, name, np.ndarray(shape, dtype, content) if content else np.zeros(shape, dtype))


def _layout(topic: str, plan: _Plan, contents: Sequence[bytes], dims: Dims) -> list[tuple[int, ...]]:
    """The shapes of the arrays of a message."""
    known = dict(dims)
    shapes = []
    for index, (content, (name, dtype, sizes)) in enumerate(zip(contents, plan.arrays, strict=True)):
        zeros = index in plan.optional and not content and known.keys() >= set(sizes)
        count, rest = divmod(len(content), dtype.itemsize)
        for size in sizes:
            if size not in known:  # the length of an array can determine only one unknown size
                others = math.prod(known.get(other, 1) for other in sizes if other != size)
                known[size] = count // max(others, 1)
        shape = tuple(known[size] for size in sizes)
        fits = math.prod(shape) == count and not rest and max(shape) <= MAX_SIZE and min(shape) >= 1
        if not (fits or zeros):
            needed = " × ".join(f"{size}={known[size]}" for size in sizes)
            raise ProtocolError(
                "shape", f"{topic}.{name}: {len(content)} bytes do not hold a {dtype.name} array of {needed}"
            )
        shapes.append(shape)
    return shapes


def _check_tree(label: str, tree: Any, deepest: int, most: int) -> None:
    """Check, level by level, the types, number and depth of the values in a map or list."""
    level, depth, parts = [tree], 0, 1
    while level:
        within: list[Any] = []
        for part in level:
            if len(part) > MAX_SIZE:
                raise ProtocolError("fields", f"{label}: a map or list has {len(part)} elements; allowed: {MAX_SIZE}")
            items = part
            if type(part) is dict:
                items = part.values()
                for kind in {*map(type, part)} - {str}:
                    raise ProtocolError("fields", f"{label}: a key has the type {kind.__name__}; allowed: text")
            if others := {*map(type, items)} - _SIMPLE:
                for kind in others - {dict, list}:
                    text = f"{label}: holds {kind.__name__}; allowed: text, numbers, booleans, nil, maps and lists"
                    raise ProtocolError("fields", text)
                within += [item for item in items if type(item) not in _SIMPLE]
            if depth == deepest and part:
                raise ProtocolError("fields", f"{label}: is nested deeper than {deepest} levels")
        depth, parts, level = depth + 1, parts + len(within), within
        if parts > most:
            raise ProtocolError("fields", f"{label}: holds at least {parts} maps and lists; allowed: {most}")


def _plain(value: Any) -> Any:
    """Convert an array to bytes, and a numpy number to a Python number."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a message cannot hold {type(value).__name__}")


_pack = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode  # a hook in C makes encoding take 25 % less time
_pack_with_numbers = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_split = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MOST_RECORDS)]).decode
_unpack_names = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_unpack_source = msgspec.msgpack.Decoder(_Source).decode
_set = msgspec.structs.force_setattr

_PLANS: dict[type[Message], _Plan] = {message: _Plan(message) for message in MESSAGES.values()}
