"""Watch a played recording as Foxglove does. The WebSocket client here follows the description of the protocol.

Description: https://github.com/foxglove/ws-protocol/blob/main/docs/spec.md.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from td3_robot.cli.main import main
from td3_robot.messages import Step
from td3_robot.recording.reader import Session

pytest.importorskip("foxglove")
websockets = pytest.importorskip("websockets.sync.client")

from tests.recording.protobuf import decoder  # noqa: E402

SESSIONS = Path(__file__).parent.parent / "replay" / "sessions"
_MESSAGE = 1  # opcode of binary messages with data
_TIMEOUT = 60  # s


class Viewer:
    """A viewer that subscribes to topics.

    Attributes:
        channels: the advertised channels, by topic.
    """

    def __init__(self, connection: Any) -> None:
        self.socket = connection
        self.channels: dict[str, Any] = {}
        self._topics: dict[int, str] = {}  # the topic of each subscription, by number of the subscription

    def receive(self) -> tuple[str, bytes] | None:
        """Receive one message. If it carries data, return its topic and payload; otherwise return None."""
        received = self.socket.recv(timeout=_TIMEOUT)
        if isinstance(received, bytes):
            opcode, subscription, _ = struct.unpack_from("<BIQ", received)
            return (self._topics[subscription], received[13:]) if opcode == _MESSAGE else None
        message = json.loads(received)
        if message["op"] == "advertise":
            self.channels |= {channel["topic"]: channel for channel in message["channels"]}
        elif message["op"] == "status":
            self._ask_again(message)
        return None

    def _ask_again(self, status: dict[str, Any]) -> None:
        """Subscribe again if the server did not know the channel yet. Any other status is a failure.

        Version 0.30.3 of foxglove-sdk advertises a channel a moment before it accepts subscriptions to the channel.
        """
        unknown = re.fullmatch(r"Unknown channel ID: (\d+)", status["message"])
        assert unknown, status
        assert len(self._topics) < 100, f"the server still does not know channel {unknown[1]}"
        topics = {channel["id"]: topic for topic, channel in self.channels.items()}
        self.subscribe(topics[int(unknown[1])])

    def subscribe(self, *topics: str) -> None:
        """Wait until the topics are advertised, and subscribe to them."""
        while not set(topics) <= self.channels.keys():
            self.receive()
        wanted = []
        for topic in topics:
            self._topics[len(self._topics)] = topic  # each subscription has a new number
            wanted.append({"id": len(self._topics) - 1, "channelId": self.channels[topic]["id"]})
        self.socket.send(json.dumps({"op": "subscribe", "subscriptions": wanted}))

    def data(self, topic: str) -> Iterator[Any]:
        """Yield the messages of a topic, decoded with the advertised schema."""
        channel = self.channels[topic]
        if channel["encoding"] == "json":
            decode: Callable[[bytes], Any] = json.loads
        else:
            decode = decoder(channel["schemaName"], base64.b64decode(channel["schema"]))
        while True:
            if (received := self.receive()) and received[0] == topic:
                yield decode(received[1])


@contextlib.contextmanager
def viewing(address: str, sock: socket.socket | None = None) -> Iterator[Viewer]:
    how = {"subprotocols": ["foxglove.sdk.v1"], "proxy": None, "close_timeout": 1}
    with websockets.connect(address, sock=sock, **how) as connection:
        yield Viewer(connection)


def narrow(address: str) -> socket.socket:
    """Open a TCP connection with small segments. The kernel then buffers less than 1 MB of data for this connection."""
    host, port = address.removeprefix("ws://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    return connection


@pytest.fixture
def served(command: Callable[..., Any]) -> tuple[Any, str]:
    """Start a monitor for Foxglove. Play a recording of walkers to this monitor, in a loop.

    Returns:
        The monitor and its address.
    """
    monitor = command("monitor", "--endpoint", "ipc://m", "--foxglove", "0", "--every", "0.5")
    address = monitor.wait_for(r"^Foxglove: (ws://127\.0\.0\.1:\d+), layout (.+\.json)$")
    command("play", str(SESSIONS / "walkers.mcap"), "--monitor", "ipc://m", "--loop")
    return monitor, address.split()[1].rstrip(",")


def test_a_viewer_reads_channels_joints_and_links(served: tuple[Any, str]) -> None:
    recorded = {
        step.sequence: step
        for _, step in Session([SESSIONS / "walkers.mcap"]).messages((Step.NAME,))
        if isinstance(step, Step) and step.source == "sim-0"
    }
    with viewing(served[1]), viewing(served[1]):
        pass  # two viewers connect and leave
    with viewing(served[1]) as viewer:
        viewer.subscribe("/sim-0/step/1", "/sim-0/1/joint_states", "/tf", "/sim-0/1/scene")
        assert viewer.channels["/sim-0/step/1"]["schemaName"] == "td3_robot.Step"
        assert "torso.height" in viewer.channels["/sim-0/step/1"]["schema"]
        steps = viewer.data("/sim-0/step/1")
        for _ in range(20):
            step = next(steps)
            original = recorded[step["sequence"]]
            assert list(step["observation"].values()) == original.observation[1].tolist()
            assert step["reward"] == original.reward[1]
        assert len(next(viewer.data("/sim-0/1/joint_states")).joints) == 6
        assert next(viewer.data("/tf")).transforms[0].parent_frame_id == "world"
        assert next(viewer.data("/sim-0/1/scene")).entities[0].frame_id == "sim-0/1/torso"


@pytest.mark.slow
def test_other_viewers_continue_if_one_viewer_stops_reading(served: tuple[Any, str]) -> None:
    """One viewer does not read its 3 MB of data, so the buffers of its connection fill up.

    The other viewer and the monitor continue.
    """
    monitor, address = served
    topics = ("/sim-0/step/0", "/sim-0/step/1", "/sim-1/step/0", "/sim-1/step/1", "/tf")
    with viewing(address, narrow(address)) as stopped, viewing(address) as reading:
        for viewer in (stopped, reading):
            viewer.subscribe(*topics)
        steps = reading.data("/sim-0/step/0")
        for _ in range(400):  # several loops of the recording
            next(steps)
        before = monitor.wait_for(r"^\S+ s, (\d+) messages")
        monitor.wait_for(r"^\S+ s, (\d+) messages", lambda match: match[0] != before)


def test_wrong_ports_give_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["monitor", "--endpoint", f"ipc://{tmp_path}/m", "--seconds", "1"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, expected in (
            (["--foxglove", "70000"], "--foxglove is 70000; allowed: whole numbers from 0 to 65535"),
            (["--foxglove", "x"], "--foxglove is 'x'; allowed: whole numbers from 0 to 65535"),
            (["--foxglove", str(port)], f"--foxglove {port}: no server can listen at 127.0.0.1:{port}"),
        ):
            assert main([*here, *words]) == 2, words
            error = capsys.readouterr().err
            assert expected in error
            assert error.count("\n") == 1, error
