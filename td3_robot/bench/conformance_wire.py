"""The sockets of the conformance kit: they send and receive every message, including wrong messages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import zmq

from td3_robot.bench.conformance import Checks
from td3_robot.errors import ProtocolError
from td3_robot.messages import Hello, Message
from td3_robot.transport import codec

PATIENCE = 10.0
"""Seconds to wait for an answer."""
QUIET = 0.3
"""If no message comes for this many seconds, the kit expects no further message."""

Kind = TypeVar("Kind", bound=Message)


class Wire:
    """One ZeroMQ socket of the kit. It sends and receives any frames.

    Args:
        kind: ``zmq.ROUTER`` or ``zmq.DEALER``.
    """

    def __init__(self, context: zmq.Context[Any], kind: int) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 200)

    def send(self, message: Message, key: bytes | None = None, **changes: Any) -> None:
        """Send a message; ``changes`` replaces or adds fields, and the value ``...`` removes a field."""
        fields = {**msgspec.msgpack.decode(codec.encode(message)), **changes}
        kept = {name: value for name, value in fields.items() if value is not ...}
        self.send_frames([message.NAME.encode(), msgspec.msgpack.encode(kept)], key)

    def send_frames(self, frames: Sequence[bytes], key: bytes | None = None) -> None:
        self.socket.send_multipart([*([] if key is None else [key]), *frames])

    def receive_frames(self, seconds: float) -> list[bytes] | None:
        """The frames of the next message; None if no message comes within this time."""
        return self.socket.recv_multipart() if self.socket.poll(max(0, int(seconds * 1e3))) else None


def read(checks: Checks, frames: Sequence[bytes], dims: Mapping[str, int]) -> Message | None:
    """Decode a message of the peer, and check its form. Return None if the message cannot be read."""
    count = len(frames)
    if not checks.expect(
        "frames", count == 2, f"a message of {count} frames: {[bytes(one[:20]) for one in frames[:4]]}"
    ):
        return None
    try:
        message = codec.decode(frames[0].decode("ascii", "replace"), frames[1], dims)
    except ProtocolError as error:
        checks.expect("form", False, str(error))
        return None
    extra = codec.extra_fields(type(message), frames[1])
    checks.expect("form", not extra, f"{message.NAME} has {extra} fields that the protocol does not have")
    return message


class Client(Wire):
    """One client of the server: a driver with some robots, or an operator."""

    def __init__(self, context: zmq.Context[Any], checks: Checks, greeting: Hello, dims: dict[str, int]) -> None:
        super().__init__(context, zmq.DEALER)
        self.hello, self.session = greeting, 0
        self._checks, self._dims = checks, dims

    def receive(self, seconds: float, kind: type[Kind]) -> Kind | None:
        """Return the next message of a kind; None if no such message comes within this time.

        This method drops messages of other kinds.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            frames = self.receive_frames(left)
            message = read(self._checks, frames, self._dims) if frames else None
            if isinstance(message, kind):
                return message
        return None

    def all_of(self, kind: type[Kind]) -> list[Kind]:
        """Collect messages of a kind until none comes for a short time."""
        return list(iter(lambda: self.receive(QUIET, kind), None))

    def expect(
        self, check: str, what: str, kind: type[Kind], seconds: float | None = None, **wanted: Any
    ) -> Kind | None:
        """Wait for a message of a kind, check its ``wanted`` fields, and return it. Return None if no message comes."""
        seconds = PATIENCE if seconds is None else seconds
        answer = self.receive(seconds, kind)
        found = {name: getattr(answer, name) for name in wanted} if answer else f"nothing within {seconds:g} s"
        demanded = f"{kind.__name__} with {wanted}"
        self._checks.expect(check, found == wanted, f"{what} gets {found}; demanded: {demanded}")
        return answer

    def ask(
        self,
        check: str,
        what: str,
        message: Message,
        kind: type[Kind],
        seconds: float | None = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        **wanted: Any,
    ) -> Kind | None:
        """Send a message with changed fields, and expect the answer."""
        self.send(message, **changes)
        return self.expect(check, what, kind, seconds, **wanted)
