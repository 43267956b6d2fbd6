"""Messages to bytes and back: msgpack, typed and size-capped.

msgspec checks the fields in C while it decodes. Only if that fails, Python unpacks the message again to explain the
error.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, ZEROS, FieldType, Message, Record, wire_fields
from td3_robot.util.arrays import FEW, finite

MAX_BYTES = max(message.MAX_BYTES for message in MESSAGES.values())
"""Largest payload of any message, in bytes."""

_INTEGERS = {"u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "i64": (-(2**63), 2**63 - 1)}
MAX_SIZE = 1 << 16
"""The largest N, O, A or E, and the most elements of any list or map."""
MAX_PARTS = 1 << 12
"""The most maps and lists in a field of kind map, because each check takes time. In a field of kind list: MAX_SIZE."""
MAX_DEPTH = 8
"""How deep a field of kind map may nest. A field of kind list holds such maps, so it may nest three levels deeper."""

MOST_RECORDS = 256
"""The most Records in one payload."""

_SIMPLE = frozenset({str, int, float, bool, type(None)})  # the leaves of maps and lists
_LAYOUTS = 256  # combinations of sizes that a plan remembers
_EXPLAINED = 1 << 20  # bytes: the codec unpacks larger invalid messages only once, without an explanation

Dims = Mapping[str, int]
Buffer = bytes | memoryview
"""A frame. A long one is a view of the received bytes, not a copy."""


def encode(message: Message) -> bytes:
    """The payload frame of a message.

    Raises:
        ValueError: a field's array has the wrong dtype or number of dimensions (a mistake in the caller).
    """
    plan = _PLANS[type(message)]
    if plan.arrays:
        for value, (dtype, ndim, name) in zip(plan.contents(message), plan.checked):  # noqa: B905
            if value is ZEROS or ((value.dtype is dtype or value.dtype == dtype) and value.ndim == ndim):
                continue
            raise ValueError(f"{message.NAME}.{name}: {value.dtype}{list(value.shape)} is not {dtype.str}")
    try:
        return _pack(message)
    except TypeError:
        return _pack_with_numbers(message)


def kind_of(name: str, size: int) -> type[Message]:
    """The message type of a topic, after a check that it allows ``size`` bytes of payload. Unpacks nothing.

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

    Args:
        name: the topic.
        payload: the frame. The arrays of the message are read-only views of it.
        dims: sizes by letter (N, O, A) that a handshake fixed. The first array with another letter determines its
            size. All arrays must agree.

    Raises:
        ProtocolError: with ``kind`` one of unknown-topic, oversize, malformed, fields, type, range, shape, value.
    """
    return decode_as(kind_of(name, len(payload)), payload, dims)


def decode_as(message: type[Message], payload: Buffer, dims: Dims | None = None) -> Message:
    """Like :func:`decode`, for a type that :func:`kind_of` returned."""
    name, plan = message.NAME, _PLANS[message]
    try:
        result = plan.unpack(payload)
    except Exception as error:  # for invalid bytes msgspec raises many unrelated types
        raise _explained(name, payload, plan, error) from None
    for key, wire in plan.deep:
        if value := getattr(result, key):
            _CHECKS[wire.kind](f"{name}.{key}", value, wire)
    if plan.arrays:
        _take_arrays(result, plan, dims)
    if problem := result.problem():
        raise ProtocolError("value", f"{name}: {problem}")
    return result


def extra_fields(message: type[Message], payload: Buffer) -> int:
    """The number of fields in a decoded payload that this version does not know.

    The function only counts fields: each missing optional field hides one unknown field.
    """
    plan = _PLANS[message]
    if payload[: len(plan.head)] == plan.head:
        return 0
    width = {0xDE: 2, 0xDF: 4}.get(payload[0], 0)  # map 16, map 32; else the first byte holds the number
    count = int.from_bytes(payload[1 : 1 + width], "big") if width else payload[0] & 0x0F
    return max(0, count - len(plan.fields))


def encode_records(records: Sequence[Record]) -> bytes:
    """The payload frame of up to MOST_RECORDS Records: an array."""
    return _pack(records)


def decode_records(payload: Buffer) -> list[Message]:
    """The Records of a payload frame: one Record, or an array of them.

    Raises:
        ProtocolError: see :func:`decode`. One bad Record fails the whole array.
    """
    parts: Sequence[Any]
    try:
        parts = _split(payload)
    except msgspec.MsgspecError:  # a single Record, or malformed: decode finds out which
        parts = [payload]
    return [decode(Record.NAME, memoryview(part)) for part in parts]


class Layout:
    """Shapes and lengths of the arrays of one message, for one combination of sizes.

    Attributes:
        arrays: name, shape and dtype of each array.
        lengths: length of each array in bytes.
        floats: indices of the arrays of floating-point numbers.
        dtype, itemsize: of the floating-point numbers.
        few: unpacks all floating-point numbers for a faster check that they are finite; None if there are many.
    """

    __slots__ = ("arrays", "dtype", "few", "floats", "itemsize", "lengths")

    def __init__(self, arrays: Sequence[tuple[str, FieldType, np.dtype[Any]]], dims: Dims) -> None:
        shaped = [(name, tuple(dims[size] for size in wire.shape), dtype) for name, wire, dtype in arrays]
        self.arrays = shaped
        self.lengths = [dtype.itemsize * math.prod(shape) for _, shape, dtype in shaped]
        kinds = {dtype for _, _, dtype in arrays if dtype.kind == "f"}
        self.dtype = kinds.pop() if kinds else np.dtype(np.float32)
        assert not kinds, "one kind of floating-point number in a message"
        self.floats = [index for index, (_, _, dtype) in enumerate(arrays) if dtype == self.dtype]
        self.itemsize = self.dtype.itemsize
        count = sum(self.lengths[index] for index in self.floats) // self.itemsize
        self.few = struct.Struct(f"<{count}{self.dtype.char}").unpack if count <= FEW else None

    def fits(self, contents: Sequence[bytes]) -> bool:
        """Whether the bytes of the arrays have the right lengths and hold finite numbers."""
        if [*map(len, contents)] != self.lengths:
            return False
        if not self.floats:
            return True
        numbers = b"".join([contents[index] for index in self.floats])  # one call of numpy instead of several
        if self.few is not None and math.isfinite(sum(self.few(numbers))):
            return True
        return finite(np.ndarray(len(numbers) // self.itemsize, self.dtype, numbers))


class _Plan:
    """How to encode and decode one message, prepared once."""

    def __init__(self, message: type[Message]) -> None:
        self.fields = {
            name: (wire, np.dtype(wire.dtype) if wire.kind == "array" else None)
            for name, wire in wire_fields(message).items()
        }
        # Checks that msgspec cannot do: finite numbers, and the depth and contents of maps and lists.
        self.deep = [(name, wire) for name, (wire, _) in self.fields.items() if wire.kind in ("f64", "map", "list")]
        self.arrays = [(name, wire, dtype) for name, (wire, dtype) in self.fields.items() if dtype is not None]
        self.required = {name for name, (wire, _) in self.fields.items() if not wire.optional}
        size = len(self.fields)
        self.head = bytes([0x80 | size]) if size < 16 else b"\xde" + size.to_bytes(2, "big")  # msgpack: map of so many
        self.checked = [(dtype, len(wire.shape), name) for name, wire, dtype in self.arrays]
        self.contents = _getter([name for name, _, _ in self.arrays])
        self.unpack = msgspec.msgpack.Decoder(message).decode
        self._sizes = sorted({size for _, wire, _ in self.arrays for size in wire.shape})
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def key(self, dims: Dims | None, contents: Sequence[bytes]) -> tuple[Any, ...]:
        """The values that determine the layout: the sizes and, if a size is unknown, the lengths of the arrays."""
        sizes = tuple(map(dims.get, self._sizes)) if dims else (None,)
        return (*sizes, *map(len, contents)) if None in sizes else sizes

    def layout(self, key: tuple[Any, ...], dims: Dims | None) -> Layout | None:
        """The layout of the arrays; None if neither ``dims`` nor an earlier call with this key has all sizes."""
        try:
            return self._layouts[key]
        except KeyError:
            if not dims or any(size not in dims for size in self._sizes):
                return None
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = Layout(self.arrays, dims)
            return layout


def _getter(names: Sequence[str]) -> Callable[[Message], tuple[Any, ...]]:
    """A function that reads these fields of a message: arrays, or their bytes right after unpacking."""
    read = operator.attrgetter(*names) if names else lambda _: ()
    return (lambda message: (read(message),)) if len(names) == 1 else read


def _take_arrays(message: Message, plan: _Plan, dims: Dims | None) -> None:
    """Replace the bytes in a message by arrays.

    Raises:
        ProtocolError: with ``kind`` shape or value.
    """
    contents = plan.contents(message)
    key = plan.key(dims, contents)
    layout = plan.layout(key, dims)
    if layout and layout.fits(contents):
        for content, (name, shape, dtype) in zip(contents, layout.arrays):  # noqa: B905
            _set(message, name, np.ndarray(shape, dtype, content))
        return
    known = dict(dims) if dims else {}
    for content, (name, wire, dtype) in zip(contents, plan.arrays, strict=True):
        _set(message, name, _array(message.NAME, name, content, wire, dtype, known))
    plan.layout(key, known)


def source_of(payload: bytes) -> str:
    """The field ``source`` of a payload, or an empty text. It helps a reader to find the sizes of the arrays."""
    try:
        content = _unpack(payload)
    except Exception:  # decode raises the right error later
        return ""
    source = content.get("source") if isinstance(content, dict) else None
    return source if isinstance(source, str) else ""


def _explained(name: str, payload: Buffer, plan: _Plan, error: Exception) -> ProtocolError:
    """The error for a payload that msgspec refused: it explains what is wrong."""
    if len(payload) > _EXPLAINED:
        return ProtocolError("malformed", f"{name}: {str(error)[:200]}")
    try:
        content = _unpack(payload)
    except Exception as problem:
        return ProtocolError("malformed", f"{name}: not msgpack ({type(problem).__name__})")
    if not isinstance(content, dict) or not plan.required <= content.keys():
        keys = sorted(str(key)[:40] for key in content)[:20] if isinstance(content, dict) else type(content).__name__
        return ProtocolError("fields", f"{name}: has {keys}, needs {sorted(plan.required)}")
    try:
        for key, (wire, _) in plan.fields.items():
            if key not in content:
                continue
            _CHECKS[wire.kind](f"{name}.{key}", content[key], wire)
    except ProtocolError as found:
        return found
    return ProtocolError("malformed", f"{name}: {str(error)[:200]}")


def _array(topic: str, name: str, value: bytes, wire: FieldType, dtype: np.dtype[Any], dims: dict[str, int]) -> Any:
    if wire.optional and not value and all(size in dims for size in wire.shape):
        return np.zeros([dims[size] for size in wire.shape], dtype)
    count, rest = divmod(len(value), dtype.itemsize)
    for size in wire.shape:
        if size not in dims:  # the length of an array determines one unknown size, not two
            others = math.prod(dims.get(other, 1) for other in wire.shape if other != size)
            dims[size] = count // max(others, 1)
    shape = tuple(dims[size] for size in wire.shape)
    if rest or math.prod(shape) != count or max(shape) > MAX_SIZE or min(shape) < 1:
        sizes = " × ".join(f"{size}={dims[size]}" for size in wire.shape)
        raise ProtocolError("shape", f"{topic}.{name}: {len(value)} bytes is not {wire.dtype} of {sizes}")
    array = np.frombuffer(value, dtype)
    if dtype.kind == "f" and not finite(array):
        raise ProtocolError("value", f"{topic}: {name} is not finite")
    return array.reshape(shape)


def _bin(label: str, value: Any, wire: FieldType) -> None:
    del wire
    if type(value) is not bytes:
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs bin")


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


def _tree(label: str, value: Any, wire: FieldType) -> None:
    """Check, level by level, that a map or list holds only text, numbers, maps and lists."""
    if type(value) is not (dict if wire.kind == "map" else list):
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs a {wire.kind}")
    deepest, most = (MAX_DEPTH, MAX_PARTS) if wire.kind == "map" else (MAX_DEPTH + 3, MAX_SIZE)
    level: list[Any] = [value]
    depth, parts = 0, 1
    while level:
        within: list[Any] = []
        for part in level:
            if len(part) > MAX_SIZE:
                raise ProtocolError("range", f"{label}: a map or list of {len(part)}, above {MAX_SIZE}")
            items = part
            if type(part) is dict:
                items = part.values()
                for kind in {*map(type, part)} - {str}:
                    raise ProtocolError("type", f"{label}: key of type {kind.__name__}, needs text")
            if others := {*map(type, items)} - _SIMPLE:
                for kind in others - {dict, list}:
                    raise ProtocolError("type", f"{label}: holds {kind.__name__}, needs text, numbers, maps and lists")
                within += [item for item in items if type(item) not in _SIMPLE]
            if depth == deepest and part:
                raise ProtocolError("range", f"{label}: nested deeper than {deepest}")
        depth, parts, level = depth + 1, parts + len(within), within
        if parts > most:
            raise ProtocolError("range", f"{label}: {parts} maps and lists or more, above {most}")


_CHECKS: dict[str, Callable[[str, Any, FieldType], None]] = {
    **dict.fromkeys(_INTEGERS, _integer),
    "text": _text,
    "bytes": _bytes,
    "f64": _number,
    "map": _tree,
    "array": _bin,
    "list": _tree,
}
_unpack = msgspec.msgpack.Decoder().decode
_set = msgspec.structs.force_setattr


def _plain(value: Any) -> Any:
    """Convert an array to bytes, and a numpy number to a Python number."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a message cannot hold {type(value).__name__}")


_pack = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode  # a hook in C: encoding costs a quarter less
_pack_with_numbers = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_split = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MOST_RECORDS)]).decode

_PLANS: dict[type[Message], _Plan] = {message: _Plan(message) for message in MESSAGES.values()}
