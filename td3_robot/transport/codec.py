"""Messages to bytes and back: msgpack, typed and size-capped. A decoder that accepts nothing it does not know.

What a field may hold is checked by msgspec while it decodes, in C. Only a message that does not pass is looked at once
more in Python, to say what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from td3_robot.arrays import finite
from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, FieldType, Message, Record, wire_fields

MAX_BYTES = max(message.MAX_BYTES for message in MESSAGES.values())
"""The largest payload any message may have: what sockets are told to cut off at."""

_INTEGERS = {"u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "i64": (-(2**63), 2**63 - 1)}
MAX_SIZE = 1 << 16
"""The largest N, O, A or E, and the most elements of any list or map."""
MAX_DEPTH = 8
"""How deep a field of kind map may nest; one of kind list, which holds such maps, three levels more."""

MOST_RECORDS = 256
"""Records in one payload."""

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
    message = kind_of(name, len(payload))
    plan = _PLANS[message]
    try:
        content = msgspec.structs.asdict(plan.unpack(payload))
    except Exception as error:  # msgspec raises half a dozen unrelated types for bytes that are not what they should be
        raise _explained(name, payload, plan, error) from None
    for key, wire in plan.deep:
        if content[key]:
            _CHECKS[wire.kind](f"{name}.{key}", content[key], wire)
    if plan.arrays and not _take_arrays(content, plan.layout(dims)):
        known = dict(dims) if dims else {}
        for key, wire, dtype in plan.arrays:
            content[key] = _array(name, key, content[key], wire, dtype, known)
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
    """

    __slots__ = ("arrays", "dtype", "floats", "itemsize")

    def __init__(self, arrays: Sequence[tuple[str, FieldType, np.dtype[Any]]], dims: Dims) -> None:
        shaped = [(name, tuple(dims[size] for size in wire.shape), dtype) for name, wire, dtype in arrays]
        self.arrays = [(name, dtype.itemsize * math.prod(shape), shape, dtype) for name, shape, dtype in shaped]
        kinds = {dtype for _, _, dtype in arrays if dtype.kind == "f"}
        self.dtype = kinds.pop() if kinds else np.dtype(np.float32)
        assert not kinds, "one kind of floating-point number in a message"
        self.floats = [name for name, _, dtype in arrays if dtype == self.dtype]
        self.itemsize = self.dtype.itemsize


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
        self._layouts: dict[tuple[int | None, ...], Layout | None] = {}

    def layout(self, dims: Dims | None) -> Layout | None:
        """Of the arrays; None where ``dims`` does not say all sizes."""
        key = tuple(map(dims.get, self._sizes)) if dims else ()
        try:
            return self._layouts[key]
        except KeyError:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = Layout(self.arrays, dims) if dims and None not in key else None
            self._layouts[key] = layout
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
        if not finite(np.ndarray(len(numbers) // layout.itemsize, layout.dtype, numbers)):
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


def _tree(label: str, value: Any, wire: FieldType, depth: int = 0) -> None:
    """A map or list of text, numbers, maps and lists; its size is capped with the whole message's."""
    if depth == 0 and not isinstance(value, dict if wire.kind == "map" else list):
        raise ProtocolError("type", f"{label}: {type(value).__name__}, needs a {wire.kind}")
    deepest = MAX_DEPTH + 3 * (wire.kind == "list")
    if depth > deepest:
        raise ProtocolError("range", f"{label}: nested deeper than {deepest}")
    if isinstance(value, dict | list) and len(value) > MAX_SIZE:
        raise ProtocolError("range", f"{label}: a map or list of {len(value)}, above {MAX_SIZE}")
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
