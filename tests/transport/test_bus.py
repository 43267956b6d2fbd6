"""Test the ZeroMQ bus: unix sockets, loopback, lost and faulty peers, large messages and malformed input."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from td3_robot.bundle import sha256
from td3_robot.core_types import Peer
from td3_robot.errors import EndpointError
from td3_robot.messages import Action, Bye, Heartbeat, Hello, Step, Throttle, Weights, Welcome
from td3_robot.transport import codec
from td3_robot.transport.bus import FOREIGN, Bus
from td3_robot.transport.link import PEER_TIMEOUT, ServerLink
from tests.contract.transport import action, kinds

pytestmark = pytest.mark.usefixtures("nobody_expires")

Make = Callable[..., Any]


@pytest.fixture(params=["ipc", "tcp", "tcp6"])
def any_endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "tcp6":
        try:
            with closing(socket.socket(socket.AF_INET6)) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    return {"ipc": f"ipc://{tmp_path}/policy", "tcp": "tcp://127.0.0.1:*", "tcp6": "tcp://[::1]:*"}[request.param]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/policy"


@pytest.fixture
def raw() -> Iterator[Callable[[int], Any]]:
    """Returns a function that makes plain ZeroMQ sockets, without the protocol of td3-robot."""
    with zmq.Context() as context:
        made: list[Any] = []

        def make(kind: int) -> Any:
            made.append(context.socket(kind))
            made[-1].setsockopt(zmq.LINGER, 0)
            made[-1].setsockopt(zmq.RCVTIMEO, 10_000)
            made[-1].setsockopt(zmq.SNDTIMEO, 10_000)
            return made[-1]

        yield make
        for item in made:
            item.close()


@pytest.fixture
def linked(endpoint: str, make_bus: Make, make_server: Make, make_client: Make, pump: Make) -> tuple[Bus, Bus, Peer]:
    """A server bus, a client bus that has joined it, and the server's peer object for the client."""
    server, client = make_bus(), make_bus()
    server.serve(endpoint, make_server())
    client.connect(endpoint, make_client())
    at_server, _ = pump(lambda got: bool(got[0] and got[1]), server, client)
    return server, client, at_server[0][0]


class Watched:
    """A server that removes silent clients, and one client that has joined. The server has a manual clock."""

    def __init__(self, endpoint: str, session: ServerLink, client: Any, hello: Hello) -> None:
        self.now = 100.0
        self.bus = Bus(clock=lambda: self.now)
        self.bus.serve(endpoint, session)
        self.client = client
        client.connect(endpoint)
        client.send_multipart([b"hello", codec.encode(hello)])
        while not self.bus.peers("policy"):
            self.bus.receive(0.0)

    def after(self, seconds: float) -> list[Any]:
        """Advance the clock and return the types of the new inputs."""
        self.now += seconds
        return kinds(self.bus.receive(0.0) + self.bus.receive(0.0))


@pytest.fixture
def watched(
    endpoint: str, make_server: Make, make_hello: Make, raw: Make, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watched]:
    monkeypatch.setattr("td3_robot.transport.link.PEER_TIMEOUT", PEER_TIMEOUT)  # undo nobody_expires
    result = Watched(endpoint, make_server(), raw(zmq.DEALER), make_hello())
    yield result
    result.bus.close()


def test_handshake_and_messages_work_in_both_directions(
    any_endpoint: str, make_bus: Make, make_server: Make, make_client: Make, make_step: Make, pump: Make, of: Make
) -> None:
    server, client = make_bus(), make_bus()
    bound = server.serve(any_endpoint, make_server(5))
    assert not bound.endswith("*")
    client.connect(bound, make_client())
    assert not client.welcome("policy")
    at_server, at_client = pump(lambda got: bool(got[0] and got[1]), server, client)
    assert kinds(at_server) == [Hello]
    assert kinds(at_client) == [Welcome]
    assert client.welcome("policy")
    peer = at_server[0][0]
    for sequence in range(3):
        assert client.send("policy", make_step(sequence))
    (at_server,) = pump(lambda got: len(of(got[0], Step)) == 3, server)
    assert [step.sequence for step in of(at_server, Step)] == [0, 1, 2]
    assert all(origin is peer for origin, _ in at_server)
    for sequence in range(3):
        assert server.send(peer, action(sequence))
    (at_client,) = pump(lambda got: len(of(got[0], Action)) == 3, client)
    assert [item.answers for item in of(at_client, Action)] == [0, 1, 2]
    assert {origin for origin, _ in at_client} == {"policy"}
    assert not server.dropped() + client.dropped()


def test_many_clients_get_their_own_answers(
    endpoint: str, make_bus: Make, make_server: Make, make_client: Make, pump: Make
) -> None:
    server = make_bus()
    server.serve(endpoint, make_server())
    clients = [make_bus() for _ in range(8)]
    for index, client in enumerate(clients):
        client.connect(endpoint, make_client(f"sim-{index}", client=index))
    got = pump(lambda got: len(got[0]) == 8 and all(got[1:]), server, *clients)
    for peer, hello in got[0]:
        assert server.send(peer, action(hello.client))
    got = pump(lambda got: all(got), *clients)
    assert [inputs[0][1].answers for inputs in got] == list(range(8))


def test_one_bus_serves_and_connects(
    tmp_path: Path, make_bus: Make, make_server: Make, make_client: Make, pump: Make
) -> None:
    """The policy server does both: it serves simulators and is a client of the learner."""
    middle, learner, simulator = make_bus(), make_bus(), make_bus()
    learner.serve(f"ipc://{tmp_path}/learner", make_server(2, "learner"))
    middle.serve(f"ipc://{tmp_path}/policy", make_server(1, "policy"))
    middle.connect(f"ipc://{tmp_path}/learner", make_client("policy", "learner", role="policy", robots=0))
    simulator.connect(f"ipc://{tmp_path}/policy", make_client())
    got = pump(lambda got: len(got[0]) == 2 and all(got), middle, learner, simulator)
    assert {origin if isinstance(origin, str) else origin.link for origin, _ in got[0]} == {"learner", "policy"}


def test_a_client_that_ended_without_a_bye_is_noticed_when_the_server_sends(
    endpoint: str, make_bus: Make, make_server: Make, make_hello: Make, pump: Make, raw: Make
) -> None:
    server, client = make_bus(), raw(zmq.DEALER)
    server.serve(endpoint, make_server())
    client.connect(endpoint)
    client.send_multipart([b"hello", codec.encode(make_hello())])
    (got,) = pump(lambda got: bool(got[0]), server)
    peer = got[0][0]
    client.close()  # sends no Bye
    (got,) = pump(lambda got: not server.send(peer, action(0)) and bool(got[0]), server)
    assert kinds(got) == [Bye]
    assert got[0][1].reason == "connection closed"


@pytest.mark.parametrize("farewell", [Bye("done"), None], ids=["bye", "none"])
def test_messages_of_a_closed_client_are_read_before_its_bye(
    endpoint: str,
    make_bus: Make,
    make_server: Make,
    make_hello: Make,
    make_step: Make,
    pump: Make,
    farewell: Bye | None,
) -> None:
    """The server cannot read all messages in one turn. The last input is the client's Bye or a Bye from the bus."""
    server = make_bus()
    server.serve(endpoint, make_server())
    sent = [make_step(sequence) for sequence in range(600)] + [farewell] * bool(farewell)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(endpoint)
        client.send_multipart([b"hello", codec.encode(make_hello())])
        (got,) = pump(lambda got: bool(got[0]), server)
        for message in [Heartbeat(0, 0), *sent]:
            client.send_multipart([message.NAME.encode(), codec.encode(message)])
    peer = got[0][0]
    deadline = time.monotonic() + 60.0
    while server.send(peer, action(0)):
        assert time.monotonic() < deadline
    (got,) = pump(lambda got: Bye in kinds(got[0]), server)
    assert [message.sequence for _, message in got if isinstance(message, Step)] == list(range(600))
    assert kinds(got)[600:] == [Bye]
    assert got[-1][1].reason == (farewell.reason if farewell else "connection closed")
    assert server.peers("policy") == []


@pytest.mark.parametrize("emptied", [True, False])
def test_a_silent_client_expires_only_when_the_queue_is_empty_or_one_more_timeout_has_passed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, emptied: bool
) -> None:
    """While a link has unread messages, the server keeps the silent clients of this link, for at most PEER_TIMEOUT."""
    with monkeypatch.context() as patch:
        patch.setattr(Bus, "_has_more", staticmethod(lambda _: True))
        for seconds in (PEER_TIMEOUT + 1.0, *[PEER_TIMEOUT / 10] * 10):
            assert watched.after(seconds) == []
        if not emptied:
            assert watched.after(0.5) == [Bye]
    if emptied:
        assert watched.after(1.0) == [Bye]


@pytest.mark.usefixtures("time_to_leave")
def test_a_server_that_closes_does_not_delete_the_socket_file_of_its_successor(
    endpoint: str, make_bus: Make, make_server: Make, make_client: Make, pump: Make, tmp_path: Path
) -> None:
    """A successor already serves the same path when the first server closes.

    The first server is also a client of a server that does not exist. Its unsent Hellos must not delay its close.
    """
    first, second, client = make_bus(), make_bus(), make_bus()
    first.serve(endpoint, make_server(1))
    first.connect(f"ipc://{tmp_path}/nobody", make_client(link="learner"))
    first.receive(0.01)
    file = tmp_path / "policy"
    file.unlink()
    second.serve(endpoint, make_server(2))
    begin = time.monotonic()
    first.close("stopped")
    assert time.monotonic() - begin < 30.0  # much less than the limit of 60 s in time_to_leave
    assert file.exists()
    client.connect(endpoint, make_client())
    pump(lambda _: client.welcome("policy"), client, second)


def test_the_server_uses_the_newest_of_many_queued_hellos(
    tmp_path: Path, make_bus: Make, make_hello: Make, raw: Make
) -> None:
    """While the learner is away, a policy server repeats its Hello. libzmq delivers all Hellos, the oldest first."""
    endpoint = f"ipc://{tmp_path}/learner"
    client, bus = raw(zmq.DEALER), make_bus()
    client.connect(endpoint)
    versions = [min(number, 100) for number in range(144)]  # the last Hellos repeat version 100
    for version in versions:
        client.send_multipart([b"hello", codec.encode(make_hello("policy", "policy", weights_version=version))])
    bus.serve(endpoint, ServerLink("learner", "learner", {"policy": ()}, {}, 1))
    inputs: list[Any] = []
    for _ in versions:
        while not client.poll(0):
            inputs += bus.receive(0.001)
        assert client.recv_multipart()[0] == b"welcome"
    hellos = [message.weights_version for _, message in inputs if isinstance(message, Hello)]
    assert hellos == list(range(101))
    (peer,) = bus.peers("learner")
    assert (peer, peer.hello.weights_version) == (inputs[-1][0], 100)


def test_a_silent_client_expires(watched: Watched) -> None:
    assert watched.after(0.0) == []
    assert watched.after(PEER_TIMEOUT + 1) == []  # the server itself was paused, so messages may be in transit
    assert watched.after(0.5) == [Bye]
    client = watched.client
    client.send_multipart([b"heartbeat", codec.encode(Heartbeat(0, 1))])
    client.recv_multipart()  # Welcome
    while not client.poll(1):
        watched.bus.receive(0.0)
    assert client.recv_multipart()[0] == b"refused"


# -- large messages --------------------------------------------------------------------------------------------------


def test_large_messages_arrive_whole(linked: tuple[Bus, Bus, Peer], pump: Make, of: Make) -> None:
    server, client, peer = linked
    payload = os.urandom(1 << 22)
    assert server.send(peer, Weights(1, 0, 0, sha256(payload), payload))
    (got,) = pump(lambda got: bool(of(got[0], Weights)), client)
    assert of(got, Weights)[0].payload == payload


# -- malformed input -------------------------------------------------------------------------------------------------

GARBAGE: dict[str, tuple[list[bytes], str]] = {
    "one frame": ([b"step"], "frames"),
    "one empty frame": ([b""], "frames"),
    "three frames": ([b"heartbeat", codec.encode(Heartbeat(1, 1)), b""], "frames"),
    "a thousand frames": ([b"x"] * 1000, "frames"),
    "two empty frames": ([b"", b""], "unknown-topic"),
    "unknown topic": ([b"\xff\xfe" * 5000, b""], "unknown-topic"),
    "not msgpack": ([b"step", b"\xc1"], "malformed"),
    "oversize": ([b"step", bytes(Step.MAX_BYTES + 1)], "oversize"),
    "wrong fields": ([b"step", codec.encode(Heartbeat(1, 1))], "fields"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_malformed_messages_are_counted_and_dropped(
    linked: tuple[Bus, Bus, Peer], endpoint: str, make_step: Make, pump: Make, of: Make, raw: Make, what: str
) -> None:
    server, client, peer = linked
    parts, kind = GARBAGE[what]
    stranger = raw(zmq.DEALER)
    stranger.connect(endpoint)
    stranger.send_multipart(parts)
    (got,) = pump(lambda _: bool(server.dropped()), server)
    assert got == []
    # The server does not decode a Step of an unknown client.
    first = "stranger" if kind in ("malformed", "fields") else kind
    assert server.dropped() == {first: 1}
    client._sockets["policy"].send_multipart(parts)  # a known client sends the same frames
    assert client.send("policy", make_step(1))
    (got,) = pump(lambda got: bool(of(got[0], Step)), server)
    assert [origin for origin, _ in got] == [peer]
    assert server.dropped() == Counter([first, kind])
    assert server.send(peer, action(1))
    pump(lambda got: bool(of(got[0], Action)), client)


def test_a_flood_of_messages_is_read_in_small_portions(
    linked: tuple[Bus, Bus, Peer],
    endpoint: str,
    make_step: Make,
    raw: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FOREIGN is the maximum number of messages of unknown clients that the server reads between two polls."""
    server, client, peer = linked
    session = server.servers["policy"]
    receive, taken = session.receive, list[bytes]()
    monkeypatch.setattr(session, "receive", lambda key, *more: taken.append(key) or receive(key, *more))
    drain, portions = server._drain, list[int]()

    def counted(socket: Any) -> Any:
        begin = len(taken)
        inputs = drain(socket)
        portions.append(sum(key != peer.key for key in taken[begin:]))
        return inputs

    monkeypatch.setattr(server, "_drain", counted)
    flooders = [raw(zmq.DEALER) for _ in range(3)]
    for flooder in flooders:
        flooder.connect(endpoint)
        for _ in range(300):
            flooder.send_multipart([b"step", b"nonsense"])
    for sequence in range(100):
        assert client.send("policy", make_step(sequence))
    steps: list[int] = []
    while server.dropped()["stranger"] < 900 or len(steps) < 100:
        steps += [message.sequence for _, message in server.receive(1.0) if isinstance(message, Step)]
    assert steps == list(range(100))  # all Steps arrive, in order
    assert sum(portions) == 900
    assert max(portions) <= FOREIGN


def test_a_message_with_very_many_frames_is_dropped_over_several_turns(
    linked: tuple[Bus, Bus, Peer], make_step: Make, pump: Make, of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, _ = linked
    kept: list[int] = []
    session = server.servers["policy"]
    receive = session.receive
    monkeypatch.setattr(
        session, "receive", lambda key, frames, *more: kept.append(len(frames)) or receive(key, frames, *more)
    )
    clock = iter(range(10**9))  # each reading advances the clock by 1 s, so a turn drops only one batch of 256 frames
    monkeypatch.setattr(server._receiver, "_clock", lambda: next(clock))
    client._sockets["policy"].send_multipart([b""] * 5000)
    assert client.send("policy", make_step(1))
    (got,) = pump(lambda got: bool(of(got[0], Step)), server)
    assert server.dropped() == {"frames": 1}
    assert max(kept) == 3
    assert len(of(got, Step)) == 1
    # The server keeps 3 frames and drops 4997 = 19 · 256 + 133. Each of the first 19 turns reads the clock twice.
    # The last turn reads it once.
    assert next(clock) == 2 * 19 + 1


def test_random_frames_are_counted_and_dropped(
    linked: tuple[Bus, Bus, Peer],
    endpoint: str,
    make_step: Make,
    pump: Make,
    of: Make,
    raw: Make,
    rng: np.random.Generator,
) -> None:
    server, client, _ = linked
    stranger = raw(zmq.DEALER)
    stranger.connect(endpoint)
    names = [b"hello", b"step", b"weights", b"status", b"bye"]
    for _ in range(300):
        parts = [rng.bytes(int(rng.integers(0, 200))) for _ in range(rng.integers(1, 4))]
        if rng.random() < 0.7:
            parts[0] = names[rng.integers(len(names))]
        stranger.send_multipart(parts)
    (got,) = pump(lambda _: server.dropped().total() == 300, server)
    assert got == []
    assert client.send("policy", make_step(1))
    pump(lambda got: bool(of(got[0], Step)), server)


def test_a_client_that_sends_a_bye_is_not_reported_as_lost(
    linked: tuple[Bus, Bus, Peer], pump: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server, client, _ = linked
    client.close("done")
    pump(lambda got: Bye in kinds(got[0]), server)
    ended = server._departures["policy"]
    pump(lambda _: ended._unexplained >= 0 and server.servers["policy"].farewells == 0, server)
    assert "ended without a Bye" not in caplog.text


def test_a_frame_above_the_limit_closes_the_connection_and_is_logged(
    linked: tuple[Bus, Bus, Peer],
    endpoint: str,
    make_step: Make,
    pump: Make,
    of: Make,
    raw: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, client, _ = linked
    stranger = raw(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(endpoint)
    stranger.send_multipart([b"weights", bytes(codec.MAX_BYTES + 4096)], copy=False)
    pump(lambda _: bool(monitor.poll(0)), server)  # libzmq closed the connection and kept nothing of the message
    stranger.disable_monitor()
    monitor.close()
    reasons = "the client's process ended, the network failed, or a frame was above"
    pump(lambda _: f"a connection on link policy ended without a Bye: {reasons}" in caplog.text, server)
    assert f"above {max(Step.MAX_BYTES, Hello.MAX_BYTES) + 1024} bytes" in caplog.text
    assert not server.dropped()
    assert client.send("policy", make_step(1))
    pump(lambda got: bool(of(got[0], Step)), server)


def test_bytes_that_are_not_zeromq_are_ignored(
    linked: tuple[Bus, Bus, Peer], endpoint: str, make_step: Make, pump: Make, of: Make, rng: np.random.Generator
) -> None:
    server, client, _ = linked
    path = endpoint.removeprefix("ipc://")
    greetings = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", b"\xff" * 64, b"", rng.bytes(4096)]
    for greeting in [*greetings, *(rng.bytes(int(rng.integers(1, 200))) for _ in range(30))]:
        with closing(socket.socket(socket.AF_UNIX)) as intruder:
            intruder.connect(path)
            intruder.sendall(greeting)
            assert server.receive(0.0) == []
    assert client.send("policy", make_step(1))
    (got,) = pump(lambda got: bool(of(got[0], Step)), server)
    assert kinds(got) == [Step]
    assert not server.dropped()


def test_a_client_survives_malformed_messages_of_a_server(
    endpoint: str, make_bus: Make, make_client: Make, pump: Make, of: Make, raw: Make
) -> None:
    server, client = raw(zmq.ROUTER), make_bus()
    server.bind(endpoint)
    client.connect(endpoint, make_client())
    pump(lambda _: bool(server.poll(0)), client)
    key, name, _ = server.recv_multipart()
    assert name == b"hello"
    for parts, _ in GARBAGE.values():
        server.send_multipart([key, *parts])
    (got,) = pump(lambda _: client.dropped().total() == len(GARBAGE), client)
    assert got == []
    server.send_multipart([key, b"welcome", codec.encode(Welcome(1, "server", 3))])
    server.send_multipart([key, b"throttle", codec.encode(Throttle("sim-0", 0, 0, 5, 0, 0))])
    (got,) = pump(lambda got: bool(of(got[0], Throttle)), client)
    assert kinds(got) == [Welcome, Throttle]


# -- endpoints -------------------------------------------------------------------------------------------------------


def test_the_socket_file_is_private_and_deleted_at_close(endpoint: str, make_bus: Make, make_server: Make) -> None:
    server = make_bus()
    assert server.serve(endpoint, make_server()) == endpoint
    path = Path(endpoint.removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    assert list(path.parent.iterdir()) == []


def test_a_busy_port_is_refused(make_bus: Make, make_server: Make) -> None:
    bound = make_bus().serve("tcp://127.0.0.1:*", make_server())
    with pytest.raises(EndpointError, match="cannot be served: Address already in use"):
        make_bus().serve(bound, make_server())


def test_a_stale_socket_file_is_replaced(
    endpoint: str, make_bus: Make, make_server: Make, make_client: Make, pump: Make
) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(endpoint.removeprefix("ipc://"))
    Path(endpoint.removeprefix("ipc://")).chmod(0o600)
    server, client = make_bus(), make_bus()
    server.serve(endpoint, make_server())
    client.connect(endpoint, make_client())
    pump(lambda got: all(got), server, client)


@pytest.mark.parametrize("bad", ["tcp://0.0.0.0:5555", "tcp://10.0.0.1:5555", "ipc://" + "x" * 108, "nonsense"])
def test_forbidden_endpoints_are_refused_by_servers_and_clients(
    bad: str, make_bus: Make, make_server: Make, make_client: Make
) -> None:
    with pytest.raises(EndpointError):
        make_bus().serve(bad, make_server())
    with pytest.raises(EndpointError):
        make_bus().connect(bad, make_client())


def test_a_file_at_the_endpoint_is_not_deleted(endpoint: str, make_bus: Make, make_server: Make) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    path.write_text("precious")
    with pytest.raises(EndpointError, match="not a socket"):
        make_bus().serve(endpoint, make_server())
    assert path.read_text() == "precious"


def test_a_served_socket_and_a_foreign_stale_socket_are_not_replaced(
    endpoint: str, make_bus: Make, make_server: Make, make_client: Make, pump: Make
) -> None:
    """When libzmq binds, it deletes any file at the path. So the bus must check the file first."""
    server, client = make_bus(), make_bus()
    server.serve(endpoint, make_server())
    path = Path(endpoint.removeprefix("ipc://"))
    inode = path.stat().st_ino
    with pytest.raises(EndpointError, match="is busy: another process serves it"):
        make_bus().serve(endpoint, make_server())
    assert path.stat().st_ino == inode
    client.connect(endpoint, make_client())
    pump(lambda got: all(got), server, client)
    foreign = path.with_name("foreign")
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(foreign))
    foreign.chmod(0o755)
    inode = foreign.stat().st_ino
    with pytest.raises(EndpointError, match="another program or user made it"):
        make_bus().serve(f"ipc://{foreign}", make_server())
    assert foreign.stat().st_ino == inode


def test_receive_returns_within_its_timeout(endpoint: str, make_server: Make) -> None:
    """Each reading of the clock advances it by 1 s. The test allows 4 s for the readings in addition to the timeout."""
    ticks = iter(range(1000))
    with closing(Bus(clock=lambda: float(next(ticks)))) as bus:
        bus.serve(endpoint, make_server())
        for timeout in (0.0, 3.0):
            begin = next(ticks)
            assert bus.receive(timeout) == []
            assert next(ticks) - begin <= timeout + 4


def test_after_an_input_a_bus_spins_for_its_spin_time(make_bus: Make) -> None:
    """``polls`` lists the timeouts in ms. A poll with timeout 0 takes 1/16 s, so 1/4 s of spinning is four polls."""
    bus, now, polls = make_bus(), [100.0], list[int]()

    class Poller:
        def poll(self, limit: int) -> list[Any]:
            polls.append(limit)
            now[0] += limit / 1000 or 0.0625
            return []

    bus._clock, bus._poller = lambda: now[0], Poller()
    bus._next_timer = 1e9
    bus.spin = 0.25
    assert bus.receive(0.5) == []
    assert polls == [500]  # no input has arrived yet, so the bus does not spin
    waiting = ("policy", Bye(""))
    bus._waiting.append(waiting)
    assert bus.receive(0.5) == [waiting]
    polls.clear()
    assert bus.receive(0.5) == []
    assert polls == [0, 0, 0, 0, 250]
    polls.clear()
    assert bus.receive(0.5) == []
    assert polls == [500]
