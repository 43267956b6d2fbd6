"""The bus in memory behaves as the one over sockets where that can be told: same sessions, same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from td3_robot.errors import HandshakeError
from td3_robot.messages import Action, Bye, Heartbeat, Hello, Message, Step, Welcome
from td3_robot.specs import RobotSpec
from td3_robot.transport.link import PEER_TIMEOUT
from td3_robot.transport.memory import MemoryBus

Make = Callable[..., Any]


def kinds(inputs: list[Any]) -> list[type[Message]]:
    return [type(message) for _, message in inputs]


def action(answers: int) -> Action:
    return Action("sim-0", 0, answers, 0, np.zeros((1, 2), np.float32), 1, 0, 0)


@pytest.fixture
def linked(make_server: Make, make_client: Make) -> tuple[MemoryBus, MemoryBus, Any]:
    """A server bus, a client bus, and the client as the server knows it."""
    server, client = MemoryBus(), MemoryBus()
    server.serve(make_server())
    client.connect(make_client(), server)
    assert client.receive(0.0) == []
    ((peer, _),) = server.receive(0.0)
    assert kinds(client.receive(0.0)) == [Welcome]
    return server, client, peer


def test_messages_both_ways_keep_their_order(linked: tuple[MemoryBus, MemoryBus, Any], make_step: Make) -> None:
    server, client, peer = linked
    for sequence in range(3):
        assert client.send("policy", make_step(sequence), 0.0)
        assert server.send(peer, action(sequence), 0.0)
    at_server: list[Any] = server.receive(0.0)
    at_client: list[Any] = client.receive(0.0)
    assert [(origin, step.sequence) for origin, step in at_server] == [(peer, 0), (peer, 1), (peer, 2)]
    assert [(origin, item.answers) for origin, item in at_client] == [("policy", 0), ("policy", 1), ("policy", 2)]


def test_what_arrives_is_decoded_bytes_not_the_senders_object(
    linked: tuple[MemoryBus, MemoryBus, Any], make_step: Make
) -> None:
    server, client, _ = linked
    step = make_step()
    client.send("policy", step, 0.0)
    step.observation[:] = 9
    ((_, received),) = server.receive(0.0)
    assert isinstance(received, Step)
    assert received.observation.tolist() == [[0, 0, 0]]


def test_server_restart(linked: tuple[MemoryBus, MemoryBus, Any], make_server: Make, make_step: Make) -> None:
    server, client, peer = linked
    server.serve(make_server(2))
    assert not server.send(peer, action(0), 1.0)
    for sequence in range(20):
        client.send("policy", make_step(sequence), 1.0)
    inputs: list[Any] = []
    for _ in range(4):
        assert kinds(server.receive(1.0)) in ([], [Hello])
        inputs += client.receive(1.0)
    ((_, welcome),) = inputs
    assert welcome.session == 2


def test_refused_client_raises(make_server: Make, make_client: Make) -> None:
    server, client = MemoryBus(), MemoryBus()
    server.serve(make_server())
    client.connect(make_client(agreement={"timing": "lockstep"}), server)
    client.receive(0.0)
    assert server.receive(0.0) == []
    with pytest.raises(HandshakeError, match="timing is free here, lockstep there"):
        client.receive(0.0)


def test_another_robot_is_refused(make_server: Make, make_client: Make, spec: RobotSpec) -> None:
    server, client = MemoryBus(), MemoryBus()
    server.serve(make_server(spec=replace(spec, control_period=0.01)))
    client.connect(make_client(), server)
    client.receive(0.0)
    server.receive(0.0)
    with pytest.raises(HandshakeError, match=r"control_period is 0.01 s here, 0.02 s there"):
        client.receive(0.0)


def test_heartbeats_and_expiry(linked: tuple[MemoryBus, MemoryBus, Any], make_step: Make) -> None:
    server, client, peer = linked
    for now in range(1, 20):
        assert client.receive(float(now)) == []
        assert server.receive(float(now)) == []
    ((origin, bye),) = server.receive(19 + PEER_TIMEOUT + 0.1)  # the client fell silent
    assert origin is peer
    assert isinstance(bye, Bye)
    assert not server.send(peer, action(0), 30.0)
    client.send("policy", make_step(0), 30.0)  # who has been silent for so long says first who it is
    assert kinds(server.receive(30.0)) == [Hello, Step]
    assert kinds(client.receive(30.0)) == [Welcome]


def test_malformed_frames_change_nothing(
    linked: tuple[MemoryBus, MemoryBus, Any], make_step: Make, rng: np.random.Generator
) -> None:
    server, client, peer = linked
    for _ in range(200):
        parts = [rng.bytes(int(rng.integers(0, 50))) for _ in range(rng.integers(0, 4))]
        server.deliver(peer.key, parts)
        server.deliver(b"stranger", parts)
        client.deliver("policy", parts)
    assert server.receive(0.0) == []
    assert client.receive(0.0) == []
    assert client.send("policy", make_step(1), 0.0)
    assert kinds(server.receive(0.0)) == [Step]


def test_a_test_can_lose_messages(linked: tuple[MemoryBus, MemoryBus, Any], make_step: Make) -> None:
    server, client, _ = linked
    deliver = server.deliver
    lost: list[Any] = []

    def lossy(origin: bytes | str, frames: Any) -> None:
        lost.append(frames) if len(lost) < 2 else deliver(origin, frames)

    server.deliver = lossy  # type: ignore[method-assign]
    for sequence in range(4):
        client.send("policy", make_step(sequence), 0.0)
    assert [message.sequence for _, message in server.receive(0.0) if isinstance(message, Step)] == [2, 3]


def test_heartbeats_are_none_of_the_cores_business(linked: tuple[MemoryBus, MemoryBus, Any]) -> None:
    server, client, peer = linked
    assert client.send("policy", Heartbeat(1, 1), 0.0)
    assert server.receive(0.0) == []
    assert server.send(peer, Heartbeat(1, 1), 0.0)
    assert client.receive(0.0) == []
