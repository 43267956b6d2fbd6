"""Publishes messages for PlotJuggler's ZMQ subscriber, which plots numbers and booleans.

A published message has the frames ``[topic][payload][time]``. The payload is a msgpack map, which may contain maps.
PlotJuggler joins the keys of these maps to a path. The time is decimal text, in seconds since 1970. PlotJuggler 3.9
defines this format in its plugin DataStreamZMQ, with the protocol "MessagePack".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from td3_robot.errors import EndpointError
from td3_robot.messages import Message
from td3_robot.recording.entries import Entry
from td3_robot.recording.values import Names, by_topic
from td3_robot.topics import QUEUE_LENGTH
from td3_robot.transport import endpoints
from td3_robot.transport.bus import LINGER

Frames = tuple[bytes, bytes, bytes]


def frames(entry: Entry, message: Message, names: Names) -> Iterator[Frames]:
    """Yield frames for each topic of :func:`by_topic` that has numbers.

    In PlotJuggler, the path of a channel ends with the field and the channel, for example
    ``sim-0/step/observation/height``.
    """
    time = f"{entry.received * 1e-9:.6f}".encode()
    for topic, values in by_topic(entry, message, names):
        if plotted := numbers(values):
            yield topic.encode(), msgspec.msgpack.encode(plotted), time


def numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return a map with the values that PlotJuggler can plot. Bytes become their length. The result has no text."""
    plotted: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            if below := numbers(value):
                plotted[name] = below
        elif isinstance(value, bytes):
            plotted[name] = len(value)
        elif value != [] and all(
            isinstance(item, int | float) for item in (value if isinstance(value, list) else [value])
        ):
            plotted[name] = value
    return plotted


class PlotJuggler:
    """A ZeroMQ PUB socket for any number of PlotJugglers. It drops messages for slow subscribers, and never waits.

    Args:
        anywhere: allow an endpoint that other machines can read.

    Raises:
        EndpointError: the endpoint is busy or malformed, or other machines can read it but ``anywhere`` is False.
    """

    def __init__(self, endpoint: str, *, anywhere: bool = False) -> None:
        endpoints.check(endpoint, bind=True, keys=True)
        if not (anywhere or endpoints.local(endpoint)):
            raise EndpointError(
                f"every machine in the network can read endpoint {endpoint!r}; allowed: ipc://PATH and tcp:// on "
                f"loopback; all other endpoints need --anywhere"
            )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        self._socket.setsockopt(zmq.LINGER, LINGER)
        self._socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"endpoint {endpoint!r} cannot be served: {error}") from None
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).chmod(0o600)

    def publish(self, entry: Entry, message: Message, names: Names) -> None:
        for item in frames(entry, message, names):
            self._socket.send_multipart(item)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        if hasattr(self, "endpoint") and self.endpoint.startswith("ipc://"):
            with contextlib.suppress(OSError):
                Path(self.endpoint.removeprefix("ipc://")).unlink()
