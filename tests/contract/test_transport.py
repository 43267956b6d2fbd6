"""Both transports of td3_robot pass the contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from td3_robot.transport.bus import Bus
from td3_robot.transport.interface import Transport
from td3_robot.transport.memory import Connection, MemoryBus, Network
from tests.contract.transport import Harness, Stranger, TransportContract


class ZeroMQHarness(Harness):
    """ZeroMQ over Unix sockets in the test's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.endpoint = f"ipc://{folder}/policy"
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def make(self) -> Transport:
        return Bus(self.clock)

    def stranger(self) -> Stranger:
        socket = self._context.socket(zmq.DEALER)
        self._sockets.append(socket)
        socket.connect(self.endpoint)
        return _Dealer(socket)

    def inject(self, client: Transport, frames: list[bytes]) -> None:
        assert isinstance(client, Bus)
        client._sockets["policy"].send_multipart(frames)

    def close(self) -> None:
        super().close()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


class _Dealer(Stranger):
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._got: list[list[bytes]] = []

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def received(self) -> list[list[bytes]]:
        while self._socket.poll(0):
            self._got.append(self._socket.recv_multipart())
        return self._got


class MemoryHarness(Harness):
    """Queues in memory."""

    endpoint = "policy"

    def __init__(self) -> None:
        super().__init__()
        self._network = Network()

    def make(self) -> Transport:
        return MemoryBus(self._network, self.clock)

    def stranger(self) -> Stranger:
        return _Intruder(self._network, MemoryBus(self._network, self.clock), self.endpoint)

    def inject(self, client: Transport, frames: list[bytes]) -> None:
        assert isinstance(client, MemoryBus)
        self._network.to_server(client._connections["policy"], frames)


class _Intruder(Stranger):
    def __init__(self, network: Network, bus: MemoryBus, endpoint: str) -> None:
        self._network = network
        self._got: list[list[bytes]] = []
        bus.deliver = self._take  # type: ignore[method-assign]
        self._connection = network.connect(endpoint, bus, "policy")

    def _take(self, connection: Connection, frames: Any) -> None:
        del connection
        self._got.append([bytes(frame) for frame in frames])

    def send(self, frames: list[bytes]) -> None:
        self._network.to_server(self._connection, frames)

    def received(self) -> list[list[bytes]]:
        return self._got


class TestZeroMQ(TransportContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        made = ZeroMQHarness(tmp_path)
        yield made
        made.close()


class TestMemory(TransportContract):
    @pytest.fixture
    def harness(self) -> Iterator[Harness]:
        made = MemoryHarness()
        yield made
        made.close()
