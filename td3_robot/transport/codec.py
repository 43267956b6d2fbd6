"""Messages to bytes and back: msgpack, typed and size-capped. A decoder that accepts nothing it does not know.

What a field may hold is checked by msgspec while it decodes, in C. Only a message that does not pass is looked at once
more in Python, to say what is wrong with it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, FieldType, Message, Record, wire_fields
from td3_robot.util.arrays import FEW, finite

MAX_BYTES = max(message.MAX_BYTES for message in MESSAGES.values())
"""The largest payload any message may have: what sockets are told to cut off at."""

_INTEGERS = {"u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "i64": (-(2**63), 2**63 - 1)}
MAX_SIZE = 1 << 16
"""The largest N, O, A or E, and the most elements of any list or map."""
MAX_PARTS = 1 << 12
"""The most maps and lists in a field of kind map; one of kind list may have MAX_SIZE. Each costs time to look at."""
MAX_DEPTH = 8
"""How deep a field of kind map may nest; one of kind list, which holds such maps, three levels more."""

MOST_RECORDS = 256
"""Records in one payload."""

_SIMPLE = frozenset({str, int, float, bool, type(None)})  # what maps and lists hold in the end
_LAYOUTS = 256  # combinations of sizes a plan remembers
_EXPLAINED = 1 << 20  # bytes up to which a message that does not pass is unpacked once more, to say why

Dims = Mapping[str, int]
Buffer = bytes | memoryview
"""A frame; a long one is seen where it was received, and not copied."""


def encode(message: Message) -> bytes:
    """The payload frame of a message.

    Raises:
        ValueError: a field's array has the wrong dtype or number of dimensions (a mistake in the caller).
    """
    content = dict(message.__dict__)
    for name, wire, dtype in _PLANS[type(message)].arrays:
        value = content[name]
        if value.dtype != dtype or value.ndim != len(wire.shape):
            raise ValueError(f"{message.NAME}.{name}: {value.dtype}{list(value.shape)} is not {wire.dtype}")
        content[name] = value.tobytes()
    return _pack(content)


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
    return decode_as(kind_of(name, len(payload)), payload, dims)


def decode_as(message: type[Message], payload: Buffer, dims: Dims | None = None) -> Message:
    """As :func:`decode`, of a payload that :func:`kind_of` has looked at."""
    name, plan = message.NAME, _PLANS[message]
    try:
        content = msgspec.structs.asdict(plan.unpack(payload))
    except Exception as error:  # msgspec raises half a dozen unrelated types for bytes that are not what they should be
        raise _explained(name, payload, plan, error) from None
    for key, wire in plan.deep:
        if content[key]:
            _CHECKS[wire.kind](f"{name}.{key}", content[key], wire)
    if plan.arrays:
        sizes = plan.key(dims, content)
        if not _take_arrays(content, plan.layout(sizes, dims)):
            known = dict(dims) if dims else {}
            for key, wire, dtype in plan.arrays:
                content[key] = _array(name, key, content[key], wire, dtype, known)
            plan.layout(sizes, known)
    result = message.of(content)
    if problem := result.problem():
        raise ProtocolError("value", f"{name}: {problem}")
    return result


def encode_records(records: Sequence[Record]) -> bytes:
    """The payload frame of MOST_RECORDS Records at most: an array of them."""
    return _pack([record.__dict__ for record in records])


def decode_records(payload: Buffer) -> list[Message]:
    """The Records of a payload frame, which is one, or an array of them.

    Raises:
        ProtocolError: as :func:`decode`; of several, none is taken then.
    """
    parts: Sequence[Any]
    try:
        parts = _split(payload)
    except msgspec.MsgspecError:  # one alone, or what decode says
        parts = [payload]
    return [decode(Record.NAME, memoryview(part)) for part in parts]


def _type(wire: FieldType) -> Any:
    """What msgspec is told of a field. It knows no integer beyond 64 bits, which msgpack has not either."""
    types: dict[str, Any] = {
        "u32": Annotated[int, Meta(ge=0, le=2**32 - 1)],
        "u64": Annotated[int, Meta(ge=0)],
        "i64": Annotated[int, Meta(le=2**63 - 1)],
        "text": Annotated[str, Meta(max_length=wire.limit)],
        "bytes": Annotated[bytes, Meta(max_length=wire.limit)],
        "f64": float,
        "map": dict[str, Any],
        "list": list[Any],
        "array": bytes,
    }
    return types[wire.kind]


class Layout:
    """What the arrays of a message must be.

    Attributes:
        arrays: name, bytes, shape and dtype of each.
        floats: names of those that hold floating-point numbers, which must be finite; dtype, itemsize: of these.
        few: unpacks these numbers, if they are few.
    """

    __slots__ = ("arrays", "dtype", "few", "floats", "itemsize")

    def __init__(self, arrays: Sequence[tuple[str, FieldType, np.dtype[Any]]], dims: Dims) -> None:
        shaped = [(name, tuple(dims[size] for size in wire.shape), dtype) for name, wire, dtype in arrays]
        self.arrays = [(name, dtype.itemsize * math.prod(shape), shape, dtype) for name, shape, dtype in shaped]
        kinds = {dtype for _, _, dtype in arrays if dtype.kind == "f"}
        self.dtype = kinds.pop() if kinds else np.dtype(np.float32)
        assert not kinds, "one kind of floating-point number in a message"
        self.floats = [name for name, _, dtype in arrays if dtype == self.dtype]
        self.itemsize = self.dtype.itemsize
        count = sum(size for name, size, _, _ in self.arrays if name in self.floats) // self.itemsize
        self.few = struct.Struct(f"<{count}{self.dtype.char}").unpack if count <= FEW else None


class _Plan:
    """How to encode and decode one message; what can be worked out once is."""

    def __init__(self, message: type[Message]) -> None:
        self.fields = {
            name: (wire, np.dtype(wire.dtype) if wire.kind == "array" else None)
            for name, wire in wire_fields(message).items()
        }
        # What msgspec cannot check: that numbers are finite, how deep maps and lists nest, and what is in them.
        self.deep = [(name, wire) for name, (wire, _) in self.fields.items() if wire.kind in ("f64", "map", "list")]
        self.arrays = [(name, wire, dtype) for name, (wire, dtype) in self.fields.items() if dtype is not None]
        self._sizes = sorted({size for _, wire, _ in self.arrays for size in wire.shape})
        types = [(name, _type(wire)) for name, (wire, _) in self.fields.items()]
        self.unpack = msgspec.msgpack.Decoder(
            msgspec.defstruct(message.__name__, types, forbid_unknown_fields=True, gc=False)
        ).decode
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def key(self, dims: Dims | None, content: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the layout follows from: the sizes; where some are not known, the lengths of the arrays as well."""
        sizes = tuple(map(dims.get, self._sizes)) if dims else (None,)
        return (*sizes, *(len(content[name]) for name, _, _ in self.arrays)) if None in sizes else sizes

    def layout(self, key: tuple[Any, ...], dims: Dims | None) -> Layout | None:
        """Of the arrays; None where neither ``dims`` says all sizes, nor an earlier call with this key did."""
        try:
            return self._layouts[key]
        except KeyError:
            if not dims or any(size not in dims for size in self._sizes):
                return None
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = Layout(self.arrays, dims)
            return layout


def _take_arrays(content: dict[str, Any], layout: Layout | None) -> bool:
    """Replace bytes by arrays if all are as they must be; else False, and somebody else finds out why."""
    if layout is None:
        return False
    for name, size, _, _ in layout.arrays:
        if len(content[name]) != size:
            return False
    if layout.floats:  # looked at together: numpy takes as long for one number as for a hundred
        numbers = b"".join([content[name] for name in layout.floats])
        few = layout.few is not None and math.isfinite(sum(layout.few(numbers)))
        if not few and not finite(np.ndarray(len(numbers) // layout.itemsize, layout.dtype, numbers)):
            return False
    for name, _, shape, dtype in layout.arrays:
        content[name] = np.ndarray(shape, dtype, content[name])
    return True


def source_of(payload: bytes) -> str:
    """The field ``source`` of a payload; empty if there is none. For readers that have to find its sizes first."""
    try:
        content = _unpack(payload)
    except Exception:  # as in decode, which will say what is wrong
        return ""
    source = content.get("source") if isinstance(content, dict) else None
    return source if isinstance(source, str) else ""


def _explained(name: str, payload: Buffer, plan: _Plan, error: Exception) -> ProtocolError:
    """Which part of a payload does not pass, in our words."""
    if len(payload) > _EXPLAINED:
        return ProtocolError("malformed", f"{name}: {str(error)[:200]}")
    try:
        content = _unpack(payload)
    except Exception as problem:
        return ProtocolError("malformed", f"{name}: not msgpack ({type(problem).__name__})")
    if not isinstance(content, dict) or content.keys() != plan.fields.keys():
        keys = sorted(str(key)[:40] for key in content)[:20] if isinstance(content, dict) else type(content).__name__
        return ProtocolError("fields", f"{name}: has {keys}, needs exactly {sorted(plan.fields)}")
    try:
        for key, (wire, _) in plan.fields.items():
            _CHECKS[wire.kind](f"{name}.{key}", content[key], wire)
    except ProtocolError as found:
        return found
    return ProtocolError("malformed", f"{name}: {str(error)[:200]}")


def _array(topic: str, name: str, value: bytes, wire: FieldType, dtype: np.dtype[Any], dims: dict[str, int]) -> Any:
    count, rest = divmod(len(value), dtype.itemsize)
    for size in wire.shape:
        if size not in dims:  # only the last unknown size of an array can follow from its length
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
    """A map or list of text, numbers, maps and lists. Level by level: of each, Python looks at the kinds alone."""
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


def _plain(value: Any) -> Any:
    """A number of numpy in a map, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a message cannot hold {type(value).__name__}")


_pack = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_split = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MOST_RECORDS)]).decode

_PLANS: dict[type[Message], _Plan] = {message: _Plan(message) for message in MESSAGES.values()}
