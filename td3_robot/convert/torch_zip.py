"""Reads the float32 tensors of a ``torch.save`` file without torch, and without unpickling anything.

Such a file is a zip: the values of each storage as raw bytes, and a pickle that says which tensor is which part of
which storage. The pickle is a program for a small stack machine that may call anything; here its instructions are
only read, and only those that a plain state dict is made of mean something. Any other one is refused by name.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from td3_robot.errors import BundleError
from td3_robot.specs import Float32

MAX_BYTES = 1 << 28
"""Of one member of a zip, unpacked, and of all tensors read."""
_MAX_PROGRAM = 1 << 22
_MAX_MEMBERS = 10_000

_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_FLOATS = "torch FloatStorage"


@dataclass(frozen=True)
class _Name:
    """A global that the pickle names; it stands for itself and is never looked up."""

    text: str


@dataclass(frozen=True)
class _Storage:
    key: str
    size: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def open_zip(content: bytes, source: str) -> zipfile.ZipFile:
    """A zip from bytes.

    Raises:
        BundleError: it is none, or has too many members.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise BundleError(f"{source}: not a zip file ({error})") from None
    if len(archive.infolist()) > _MAX_MEMBERS:
        raise BundleError(f"{source}: {len(archive.infolist())} members; at most {_MAX_MEMBERS} are allowed")
    return archive


def read_member(archive: zipfile.ZipFile, name: str, source: str, limit: int = MAX_BYTES) -> bytes:
    """A member's content.

    Raises:
        BundleError: it is not there, damaged, or longer than ``limit`` once unpacked.
    """
    try:
        with archive.open(name) as file:
            content = file.read(limit + 1)
    except KeyError:
        raise BundleError(f"{source}: it has no member {name!r}") from None
    except Exception as error:  # zipfile raises a dozen unrelated types for damaged members
        raise BundleError(f"{source}: member {name!r} is damaged ({type(error).__name__}: {error})") from None
    if len(content) > limit:
        raise BundleError(f"{source}: member {name!r} has more than {limit} bytes")
    return content


def read_state_dict(content: bytes, source: str, prefix: str = "") -> dict[str, Float32]:
    """The tensors of a saved state dict whose names begin with ``prefix``; float32, of any shape, contiguous copies.

    Raises:
        BundleError: not such a file, damaged, or with anything in it but float32 tensors.
    """
    archive = open_zip(content, source)
    programs = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(programs) != 1:
        raise BundleError(f"{source}: not a file that torch.save writes: it has no data.pkl")
    root = programs[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist():
        order = read_member(archive, f"{root}byteorder", source, 64)
        if order != b"little":
            raise BundleError(f"{source}: byte order {order[:16]!r}; only little-endian files are read")
    try:
        described = _run(read_member(archive, programs[0], source, _MAX_PROGRAM), source)
    except BundleError:
        raise
    except Exception as error:  # a program that is cut off, or that takes from an empty stack
        raise BundleError(f"{source}: damaged data.pkl ({type(error).__name__}: {error})") from None
    if not isinstance(described, dict):
        raise BundleError(f"{source}: it holds no dictionary")
    result = {}
    left = MAX_BYTES
    for name, tensor in described.items():
        if not name.startswith(prefix):
            continue
        if not isinstance(tensor, _Tensor):
            raise BundleError(f"{source}: {name[:60]!r} is not a tensor; a plain state dict is needed")
        values = read_member(archive, f"{root}data/{tensor.storage.key}", source, left)
        left -= len(values)
        result[name] = _values(name, tensor, values, source)
    return result


def _values(name: str, tensor: _Tensor, content: bytes, source: str) -> Float32:
    size = math.prod(tensor.shape)
    contiguous = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
    strides = tuple(given if length != 1 else own for given, length, own in zip(
        tensor.strides, tensor.shape, contiguous, strict=True))  # fmt: skip
    if strides != contiguous or len(content) != 4 * tensor.storage.size or tensor.offset + size > tensor.storage.size:
        raise BundleError(
            f"{source}: {name[:60]}: shape {tensor.shape}, strides {tensor.strides} and storage do not fit"
        )
    return np.frombuffer(content, "<f4", size, 4 * tensor.offset).reshape(tensor.shape).astype(np.float32)


def _run(program: bytes, source: str) -> Any:
    """What the pickle describes: dicts, tuples, text, numbers and tensors; nothing is imported or called."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        begin = marks.pop()
        taken = stack[begin:]
        del stack[begin:]
        return taken

    argument: Any
    for opcode, argument, _ in pickletools.genops(program):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                (result,) = stack
                return result
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(opcode.name[-1])
                stack[-length:] = [tuple(stack[-length:])]
            case "SETITEM":
                items = [stack.pop(), stack.pop()][::-1]
                _set(stack[-1], items)
            case "SETITEMS":
                items = since_mark()
                _set(stack[-1], items)
            case "GLOBAL":
                if argument not in (_DICT, _TENSOR, _FLOATS):
                    raise BundleError(f"{source}: it names {argument[:80]!r}; only float32 tensors are read")
                stack.append(_Name(argument))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments, name = stack.pop(), stack.pop()
                stack.append(_made(name, arguments))
            case "BUILD":  # attributes of the dict: versions of its modules
                if not isinstance(stack.pop(), dict) or not isinstance(stack[-1], dict):
                    raise BundleError(f"{source}: it sets attributes of something that is not a dictionary")
            case other:
                raise BundleError(f"{source}: its pickle uses {other}, which a plain state dict does not need")
    raise BundleError(f"{source}: damaged data.pkl: it does not end")


def _set(target: Any, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Text alone: to hash or print nested tuples that share their parts can take for ever.
        if type(target) is not dict or type(key) is not str:
            raise ValueError(f"an item of a {type(target).__name__} under a key of type {type(key).__name__}")
        target[key] = value


def _storage(identity: Any) -> _Storage:
    word, kind, key, _, size = identity
    if word != "storage" or kind != _Name(_FLOATS) or not (type(key) is str and key.isascii() and key.isdigit()):
        raise ValueError("a storage of something else")
    if type(size) is not int or not 0 <= size <= MAX_BYTES // 4:
        raise ValueError("a storage of a size that is not allowed")
    return _Storage(key, size)


def _made(name: Any, arguments: Any) -> Any:
    if name == _Name(_DICT) and arguments == ():
        return {}
    if name != _Name(_TENSOR):
        raise ValueError("a call of something else")
    storage, offset, shape, strides = arguments[:4]
    sizes = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > 8:
        raise ValueError("a tensor of something else")
    if not all(type(size) is int and 0 <= size <= MAX_BYTES for size in sizes):
        raise ValueError("a tensor of sizes that are not allowed")
    return _Tensor(storage, offset, shape, strides)
