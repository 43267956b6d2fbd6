"""Decodes protobuf messages with the definition that comes with them, as a viewer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass


def decoder(name: str, definition: bytes) -> Callable[[bytes], Any]:
    """Return a function that decodes messages of type ``name``. ``definition`` is a serialized FileDescriptorSet."""
    pool = descriptor_pool.DescriptorPool()
    for file in FileDescriptorSet.FromString(definition).file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    kind: Any = GetMessageClass(pool.FindMessageTypeByName(name))
    return lambda data: kind.FromString(data)
