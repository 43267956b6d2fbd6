"""Serves messages to Foxglove and Lichtblick, over the Foxglove WebSocket protocol."""

from __future__ import annotations

import foxglove

from td3_robot.errors import EndpointError
from td3_robot.messages import Message
from td3_robot.recording.entries import Entry
from td3_robot.recording.foxglove_messages import LAYOUT, Converter
from td3_robot.recording.values import Names

_HOST = "127.0.0.1"


class Foxglove:
    """A WebSocket server for any number of viewers on this machine.

    It drops messages for slow viewers, and never waits.

    Args:
        port: TCP port on loopback; 0 for a free port.

    Attributes:
        address: address for the viewers.
        layout: file of a layout for the viewers.

    Raises:
        EndpointError: the port is busy.
    """

    layout = LAYOUT

    def __init__(self, port: int) -> None:
        self._context = foxglove.Context()
        self._converter = Converter()
        self._channels: dict[str, foxglove.Channel] = {}
        foxglove.set_log_level("WARNING")
        try:
            self._server = foxglove.start_server(name="td3-robot", host=_HOST, port=port, context=self._context)
        except Exception as error:  # the SDK has no exception class for a busy port
            raise EndpointError(f"--foxglove {port}: no server can listen at {_HOST}:{port}: {error}") from None
        self.address = f"ws://{_HOST}:{self._server.port}"

    def publish(self, entry: Entry, message: Message, names: Names) -> None:
        """Send a message to the viewers. Serialize a message only if a viewer shows its topic."""
        del names  # the converter takes the names from the Hello
        for draft in self._converter.convert(entry, message):
            channel = self._channels.get(draft.topic)
            if channel is None:
                schema = draft.schema()
                channel = self._channels[draft.topic] = foxglove.Channel(
                    draft.topic,
                    message_encoding=schema.message_encoding,
                    schema=foxglove.Schema(name=schema.name, encoding=schema.encoding, data=schema.definition),
                    context=self._context,
                )
            if channel.has_sinks():
                channel.log(draft.data(), log_time=entry.received)

    def close(self) -> None:
        self._server.stop()
