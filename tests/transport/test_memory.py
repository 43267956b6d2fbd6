"""Test the in-memory bus: a restart of a server, messages dropped on purpose, and Heartbeats that a core sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from td3_robot.messages import Heartbeat, Hello, Step
from td3_robot.transport.memory import Connection, MemoryBus, Network

Make = Callable[..., Any]


@pytest.fixture
def linked(make_server: Make, make_client: Make) -> tuple[MemoryBus, MemoryBus, Any]:
    """A server bus, a client bus that has joined it, and the server's peer object for the client. The clock shows 0."""
    network = Network()
    server, client = MemoryBus(network, lambda: 0.0), MemoryBus(network, lambda: 0.0)
    server.serve("policy", make_server())
    client.connect("policy", make_client())
    assert client.receive(0.0) == []
    ((peer, _),) = server.receive(0.0)
    client.receive(0.0)
    return server, client, peer


def test_a_second_call_of_serve_restarts_the_server(
    linked: tuple[MemoryBus, MemoryBus, Any], make_server: Make, make_step: Make
) -> None:
    server, client, peer = linked
    server.serve("policy", make_server(2))
    assert not server.send(peer, Heartbeat(0, 0))
    for sequence in range(20):
        client.send("policy", make_step(sequence))
    inputs: list[Any] = []
    for _ in range(4):
        assert {type(message) for _, message in server.receive(0.0)} <= {Hello}
        inputs += client.receive(0.0)
    ((_, welcome),) = inputs
    assert welcome.session == 2


def test_messages_can_be_dropped_on_purpose(linked: tuple[MemoryBus, MemoryBus, Any], make_step: Make) -> None:
    server, client, _ = linked
    deliver = server.deliver
    lost: list[Any] = []

    def lossy(connection: Connection, frames: Any) -> None:
        lost.append(frames) if len(lost) < 2 else deliver(connection, frames)

    server.deliver = lossy  # type: ignore[method-assign]
    for sequence in range(4):
        client.send("policy", make_step(sequence))
    assert [message.sequence for _, message in server.receive(0.0) if isinstance(message, Step)] == [2, 3]


def test_a_heartbeat_sent_by_a_core_reaches_no_other_core(linked: tuple[MemoryBus, MemoryBus, Any]) -> None:
    server, client, peer = linked
    assert client.send("policy", Heartbeat(1, 1))
    assert server.receive(0.0) == []
    assert server.send(peer, Heartbeat(1, 1))
    assert client.receive(0.0) == []
