"""Keys over real TCP. An allowed key connects. Wrong, missing and revoked keys do not. Unknown clients do no harm."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from td3_robot.errors import EndpointError, HandshakeError
from td3_robot.messages import Action, Bye, Command, Hello, Step, Welcome
from td3_robot.transport import bus as bus_module
from td3_robot.transport import codec, curve
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import CLIENT, ROLES, AllowList, KeyFolder
from td3_robot.transport.link import ClientLink, ServerLink

pytestmark = pytest.mark.usefixtures("nobody_expires")

Make = Callable[..., Any]
Folders = tuple[KeyFolder, KeyFolder]
Linked = tuple[Bus, Bus, str]
_PATIENCE = 20.0  # s
_QUIET = 0.6  # s; long enough for a handshake, so that the tests notice if a handshake succeeds by mistake


@pytest.fixture
def folders(tmp_path: Path) -> tuple[KeyFolder, KeyFolder]:
    """Key folders of a server and of a robot. Each folder allows the other's key."""
    server, robot = KeyFolder(tmp_path / "server"), KeyFolder(tmp_path / "robot")
    server.allow("robot-7", robot.create("robot-7").public)
    robot.allow("server", server.create("server").public, "server:policy")
    return server, robot


@pytest.fixture
def make_locked() -> Iterator[Callable[[KeyFolder | None], Bus]]:
    """Returns a function that builds a bus with the keys of a folder. If the folder is None, the bus has no keys."""
    with ExitStack() as stack:

        def make(folder: KeyFolder | None) -> Bus:
            bus = Bus(keys=AllowList(folder) if folder else None)
            stack.callback(bus.close)
            return bus

        yield make


@pytest.fixture
def stranger() -> Iterator[Make]:
    """Returns a function that makes DEALER sockets.

    If the function gets a server's public key, the new socket uses CURVE with new keys.
    """
    with zmq.Context() as context, ExitStack() as stack:

        def make(server: str | None = None) -> Any:
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            if server:
                public, secret = zmq.curve_keypair()
                dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = public, secret, server.encode()
            return dealer

        yield make


def listen(seconds: float, *buses: Bus) -> list[Any]:
    """Return all inputs that the buses receive in ``seconds``."""
    got: list[Any] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for bus in buses:
            got += bus.receive(0.01)
    return got


def wait_for_role(server: Bus, key: str, role: str, pump: Make) -> None:
    """Receive until the server has read the allow-list that gives the key this role."""
    keys = server.keys
    assert keys
    pump(lambda _: keys.may(key, role), server)


def exchange(server: Bus, client: Bus, make_step: Make, pump: Make, of: Make) -> Any:
    """Send a Step to the server and an Action back. Return the server's peer object for the client."""
    assert client.send("policy", make_step(1))
    got, _ = pump(lambda got: bool(of(got[0], Step)), server, client)
    peer = next(origin for origin, message in got if isinstance(message, Step))
    assert server.send(peer, Action("sim-0", 0, 1, 0, np.zeros((1, 2), np.float32), 1, 0, 0))
    pump(lambda got: bool(of(got[0], Action)), client)
    return peer


@pytest.fixture
def linked(
    folders: Folders, make_locked: Make, make_server: Make, make_client: Make, pump: Make
) -> tuple[Bus, Bus, str]:
    """A server bus, a robot's bus that is connected to it over CURVE, and the endpoint."""
    server, robot = make_locked(folders[0]), make_locked(folders[1])
    bound = server.serve("tcp://127.0.0.1:*", make_server())
    robot.connect(bound, make_client())
    pump(lambda got: bool(got[0] and got[1]), server, robot)
    return server, robot, bound


def test_an_allowed_key_connects(linked: Linked, folders: Folders, make_step: Make, pump: Make, of: Make) -> None:
    server, robot, _ = linked
    peer = exchange(server, robot, make_step, pump, of)
    assert peer.owner == folders[1].identity().public
    assert not server.dropped() + robot.dropped()


def test_a_client_moves_to_another_address_of_its_server(
    linked: Linked, folders: Folders, make_locked: Make, make_server: Make, make_step: Make, pump: Make, of: Make
) -> None:
    """The client first moves to a server with a wrong key, and refuses this server.

    Then the client moves to a server with the right key.
    """
    _, robot, _ = linked
    other = KeyFolder(folders[0].path.parent / "other")
    other.create("other")
    impostor, server = make_locked(other), make_locked(folders[0])
    robot.move("policy", impostor.serve("tcp://127.0.0.1:*", make_server(2)))
    pump(lambda _: bool(robot.dropped()["no-handshake"]), impostor, robot)
    robot.move("policy", server.serve("tcp://127.0.0.1:*", make_server(3)))
    pump(lambda got: bool(got[0] and got[1]), server, robot)
    peer = exchange(server, robot, make_step, pump, of)
    assert peer.owner == folders[1].identity().public


def test_messages_are_encrypted_on_the_wire(
    folders: Folders, make_locked: Make, make_server: Make, make_client: Make, pump: Make
) -> None:
    """A relay between the server and the robot sees no names and no topics."""
    server, robot = make_locked(folders[0]), make_locked(folders[1])
    bound = server.serve("tcp://127.0.0.1:*", make_server())
    with closing(socket.create_server(("127.0.0.1", 0))) as relay:
        robot.connect(f"tcp://127.0.0.1:{relay.getsockname()[1]}", make_client(name="secret-name"))
        relay.settimeout(_PATIENCE)
        with closing(relay.accept()[0]) as near, closing(socket.create_connection(_address(bound))) as far:
            seen = b""

            def carry(got: list[Any]) -> bool:
                nonlocal seen
                for source, sink in ((near, far), (far, near)):
                    source.setblocking(False)
                    try:
                        data = source.recv(65536)
                    except BlockingIOError:
                        continue
                    seen += data
                    sink.setblocking(True)
                    sink.sendall(data)
                return bool(got[0] and got[1])

            at_server, _ = pump(carry, server, robot)
    assert at_server[0][0].name == "secret-name"
    assert b"CURVE" in seen
    assert b"secret-name" not in seen
    assert b"hello" not in seen


def test_a_key_that_is_not_allowed_is_refused(
    linked: Linked,
    folders: Folders,
    tmp_path: Path,
    make_locked: Make,
    make_client: Make,
    make_step: Make,
    pump: Make,
    of: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client trusts the server, but the server does not allow the client's key. Later the server allows it."""
    server, robot, bound = linked
    other = KeyFolder(tmp_path / "other")
    key = other.create("robot-8").public
    other.allow("server", folders[0].identity().public, "server:policy")
    client = make_locked(other)
    client.connect(bound, make_client("sim-8", client=8))
    got, _ = pump(lambda _: bool(server.dropped()["denied"] and client.dropped()["not-allowed"]), server, client)
    assert got == []
    assert f"td3-robot keys allow NAME '{key}'" in caplog.text  # the server's log names the remedy
    command = f"td3-robot keys allow robot-8 '{key}'"
    assert f"does not allow this machine's key; on the server's machine, run: {command}" in caplog.text
    exchange(server, robot, make_step, pump, of)
    folders[0].allow("robot-8", key)  # the client then connects without a restart
    pump(lambda got: any(isinstance(message, Hello) for _, message in got[0]) and bool(got[1]), server, client)


def test_a_client_refuses_a_server_with_another_key(
    linked: Linked,
    folders: Folders,
    tmp_path: Path,
    make_locked: Make,
    make_client: Make,
    pump: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server allows the robot's key, but the robot expects another server's key. So the robot sends no message."""
    server, _, bound = linked
    folders[1].revoke("server")
    folders[1].allow("server", KeyFolder(tmp_path / "x").create("x").public, "server:policy")
    client = make_locked(folders[1])
    client.connect(bound, make_client("sim-8", client=8))
    got, _ = pump(lambda _: bool(client.dropped()["no-handshake"]), server, client)
    assert not any(isinstance(message, Hello) for _, message in got)
    assert f"link policy: the connection to {bound} ended during the handshake: " in caplog.text
    assert "the server does not hold the key" in caplog.text
    assert "td3-robot keys allow" not in caplog.text


def test_the_log_does_not_advise_to_accept_a_key_if_a_tunnel_closes_the_connection(
    folders: Folders, make_locked: Make, make_client: Make, pump: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing serves behind the tunnel. So the client cannot know whether the server has another key."""
    robot = make_locked(folders[1])
    with closing(Relay()) as tunnel:
        robot.connect(tunnel.endpoint, make_client())
        pump(lambda _: tunnel.carry() or robot.dropped()["no-handshake"] >= 2, robot)  # it tries again
    assert "nothing serves behind a tunnel" in caplog.text
    assert "td3-robot keys allow" not in caplog.text


@pytest.mark.parametrize("to", ["server", "client"])
@pytest.mark.parametrize("with_keys", [True, False])
def test_a_client_connects_again_after_damaged_bytes(
    to: str,
    with_keys: bool,
    folders: Folders,
    make_locked: Make,
    make_server: Make,
    make_client: Make,
    make_step: Make,
    pump: Make,
    of: Make,
) -> None:
    """A relay damages the bytes of one message. With keys, the receiver cannot decrypt the message.

    Without keys, the damaged bytes announce a message above the size limit.
    """
    server, robot = (make_locked(folder if with_keys else None) for folder in folders)
    with closing(Relay(server.serve("tcp://127.0.0.1:*", make_server()))) as relay:
        robot.connect(relay.endpoint, make_client())
        ((peer, _), *_), _ = pump(lambda got: relay.carry() or bool(got[0] and got[1]), server, robot)
        relay.damage[to] = _flipped if with_keys else _endless
        if to == "server":
            assert robot.send("policy", make_step(1))
        else:
            assert server.send(peer, Action("sim-0", 0, 1, 0, np.zeros((1, 2), np.float32), 1, 0, 0))
        pump(lambda _: relay.carry() or (not relay.damage and relay.accepted == 2), server, robot)
        pump(lambda got: relay.carry() or any(isinstance(message, Hello) for _, message in got[0]), server, robot)
        pump(lambda _: relay.carry() or robot.send("policy", make_step(2)), server, robot)
        pump(lambda got: relay.carry() or bool(of(got[0], Step)), server, robot)


def test_a_client_without_a_key_is_refused(
    linked: Linked,
    make_locked: Make,
    make_client: Make,
    make_step: Make,
    make_hello: Make,
    pump: Make,
    of: Make,
    stranger: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client tries again each second, and its log names the reason."""
    server, robot, bound = linked
    client = make_locked(None)
    client.connect(bound, make_client("sim-8", client=8))
    got, _ = pump(lambda _: client.dropped()["no-keys"] >= 2, client, server)
    assert got == []
    assert f"link policy: the server at {bound} requires keys (set endpoints.keys, or --keys, " in caplog.text
    plain = stranger()
    plain.connect(bound)
    plain.send_multipart([b"hello", codec.encode(make_hello(name="sim-9", client=9))])
    assert listen(_QUIET, server, client) == []
    assert not plain.poll(0)
    exchange(server, robot, make_step, pump, of)


def test_a_client_with_keys_does_not_join_a_server_without_keys(
    folders: Folders, make_locked: Make, make_server: Make, make_client: Make
) -> None:
    server, robot = make_locked(None), make_locked(folders[1])
    robot.connect(server.serve("tcp://127.0.0.1:*", make_server()), make_client())
    assert listen(_QUIET, server, robot) == []
    assert not robot.welcome("policy")


def test_the_server_forgets_a_client_with_a_revoked_key(
    linked: Linked, folders: Folders, make_step: Make, pump: Make, of: Make
) -> None:
    """The server's core gets a Bye. The TCP connection stays open, but no message passes in either direction."""
    server, robot, _ = linked
    peer = exchange(server, robot, make_step, pump, of)
    folders[0].revoke("robot-7")
    (got,) = pump(lambda got: bool(got[0]), server)  # the server notices the revocation without any message
    ((origin, bye),) = got
    assert origin is peer
    assert isinstance(bye, Bye)
    assert bye.reason == "its key was revoked"
    assert not server.send(peer, Action("sim-0", 0, 1, 0, np.zeros((1, 2), np.float32), 1, 0, 0))
    assert robot.send("policy", make_step(2))
    got, _ = pump(lambda _: bool(server.dropped()["revoked"]), server, robot)
    assert got == []
    folders[0].allow("robot-7", folders[1].identity().public)
    # The robot joins again by itself.
    pump(lambda got: any(isinstance(message, Hello) for _, message in got[0]), server, robot)


def test_a_client_leaves_a_revoked_server(
    linked: Linked, folders: Folders, make_step: Make, pump: Make, of: Make
) -> None:
    server, robot, _ = linked
    folders[1].revoke("server")
    pump(lambda _: not robot.welcome("policy"), robot)
    robot.send("policy", make_step(2))
    assert not of(listen(_QUIET, server, robot), Step)
    folders[1].allow("server", folders[0].identity().public, "server:policy")
    pump(lambda got: bool(of(got[1], Welcome)), server, robot)
    exchange(server, robot, make_step, pump, of)


def test_the_name_of_a_robot_belongs_to_its_key(
    linked: Linked,
    folders: Folders,
    tmp_path: Path,
    make_locked: Make,
    make_client: Make,
    make_step: Make,
    pump: Make,
    of: Make,
) -> None:
    """A client with a later incarnation replaces the earlier client only if both have the same key."""
    server, robot, bound = linked
    other = KeyFolder(tmp_path / "other")
    key = other.create("robot-8").public
    folders[0].allow("robot-8", key)
    wait_for_role(server, key, "simulator", pump)
    other.allow("server", folders[0].identity().public, "server:policy")
    client = make_locked(other)
    client.connect(bound, make_client("sim-0", client=8, incarnation=99))
    with pytest.raises(HandshakeError, match="name 'sim-0' is taken by a simulator with another key"):
        pump(lambda _: False, server, client)
    exchange(server, robot, make_step, pump, of)


def test_only_a_key_with_the_operator_role_may_command(
    folders: Folders, make_locked: Make, make_hello: Make, pump: Make, of: Make
) -> None:
    """The robot is an operator only while its key has the role: not before, and not after a revocation."""
    session = ServerLink("policy", "server", {"operator": (Command,)}, {}, 1)
    server = make_locked(folders[0])
    bound = server.serve("tcp://127.0.0.1:*", session)
    key = folders[1].identity().public

    def operator() -> Bus:
        bus: Bus = make_locked(folders[1])
        bus.connect(bound, ClientLink("policy", make_hello("operator", name="op"), ()))
        return bus

    with pytest.raises(HandshakeError, match=r"the key of 'op' may not have role operator; .* --role operator"):
        pump(lambda _: False, server, operator())
    folders[0].allow("robot-7", key, "operator")
    wait_for_role(server, key, "operator", pump)
    client = operator()
    pump(lambda got: bool(of(got[1], Welcome)), server, client)
    assert client.send("policy", Command(1, "", "reset", "", 0, "", b""))
    pump(lambda got: bool(of(got[0], Command)), server)
    folders[0].revoke("robot-7")
    folders[0].allow("robot-7", key)
    pump(lambda got: bool(of(got[0], Bye)), server)
    with pytest.raises(HandshakeError, match="may not have role operator"):
        pump(lambda _: False, server, client)


@pytest.mark.parametrize("role", [*ROLES, CLIENT])
def test_a_key_connects_only_in_its_roles(
    role: str, tmp_path: Path, make_locked: Make, make_hello: Make, stranger: Make
) -> None:
    """The server serves every role. It welcomes a key only in the roles that the allow-list gives to this key."""
    folder = KeyFolder(tmp_path / "server")
    folder.create("server")
    dealer, (public, secret) = stranger(), zmq.curve_keypair()
    dealer.curve_publickey, dealer.curve_secretkey = public, secret
    dealer.curve_serverkey = folder.identity().public.encode()
    folder.allow("guest", public.decode(), role)
    server = make_locked(folder)
    session = ServerLink("policy", "server", dict.fromkeys(ROLES, ()), {}, 1)
    dealer.connect(server.serve("tcp://127.0.0.1:*", session))
    for number, wanted in enumerate(ROLES):
        hello = make_hello(wanted, name=f"guest-{number}", client=number)
        dealer.send_multipart([b"hello", codec.encode(hello)])
        end = time.monotonic() + _PATIENCE
        while not dealer.poll(0) and time.monotonic() < end:
            server.receive(0.01)
        topic, payload = dealer.recv_multipart(zmq.DONTWAIT)
        may = wanted == role or (role == CLIENT and wanted != "operator")
        assert topic == (b"welcome" if may else b"refused"), wanted
        assert may or f"may not have role {wanted}" in codec.decode("refused", payload).reason


def test_a_stolen_key_of_the_server_works_until_the_server_has_a_new_key_pair(
    tmp_path: Path, make_locked: Make, make_hello: Make, pump: Make, of: Make
) -> None:
    """A thief with a copy of the server's key folder can connect to this server, even as an operator."""
    folder, copy = KeyFolder(tmp_path / "server"), KeyFolder(tmp_path / "copy")
    folder.create("server")
    shutil.copytree(folder.path, copy.path)

    def connect() -> tuple[Bus, Bus]:
        server, thief = make_locked(folder), make_locked(copy)
        bound = server.serve("tcp://127.0.0.1:*", ServerLink("policy", "server", {"operator": (Command,)}, {}, 1))
        thief.connect(bound, ClientLink("policy", make_hello("operator", name="op"), ()))
        return server, thief

    pump(lambda got: bool(of(got[1], Welcome)), *connect())
    folder.secret_file.unlink()
    public = folder.create("server").public
    copy.allow("server", public, "server:policy")  # the new public key, which is no secret, does not help the thief
    server, thief = connect()
    pump(lambda _: bool(server.dropped()["denied"] and thief.dropped()["not-allowed"]), server, thief)


@pytest.mark.parametrize("link", ["learner", "recorder"])
def test_the_server_of_one_link_cannot_be_the_server_of_another(
    link: str, folders: Folders, make_locked: Make, make_server: Make, make_client: Make, pump: Make
) -> None:
    """The robot trusts this server only on the link ``policy``.

    So the server cannot be the robot's learner or the robot's recorder.
    """
    server, robot = make_locked(folders[0]), make_locked(folders[1])
    robot.connect(server.serve("tcp://127.0.0.1:*", make_server(link=link)), make_client(link=link))
    got, _ = pump(lambda _: bool(robot.dropped()["no-handshake"]), server, robot)
    assert got == []


def test_a_message_with_the_routing_identity_of_another_client_is_dropped(
    linked: Linked, make_step: Make, pump: Make, of: Make
) -> None:
    """The sender of the message and the owner of the routing identity have different keys."""
    server, robot, _ = linked
    peer = exchange(server, robot, make_step, pump, of)
    session = server.servers["policy"]
    frames = [b"step", codec.encode(make_step(2))]
    assert session.receive(peer.key, frames, 0.0, "another") == ([], [])
    inputs, _ = session.receive(peer.key, frames, 0.0, peer.owner)
    assert len(inputs) == 1


def test_a_message_without_a_key_belongs_to_no_known_client(linked: Linked) -> None:
    assert curve.owner(zmq.Frame(b"from nowhere")) == ""
    server, _, _ = linked
    assert server.keys
    assert server.keys.client("") is None


def test_connections_without_a_handshake_are_closed(
    folders: Folders, make_locked: Make, make_server: Make, pump: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that connects and sends nothing loses its connection after ``_DEAD`` (5 s; 0.2 s in this test)."""
    monkeypatch.setattr(bus_module, "_DEAD", 200)  # ms
    server = make_locked(folders[0])
    with closing(socket.create_connection(_address(server.serve("tcp://127.0.0.1:*", make_server())))) as silent:
        silent.setblocking(False)

        def closed(_: Any) -> bool:
            try:
                while silent.recv(1000):
                    pass  # the server's greeting
            except BlockingIOError:
                return False
            except ConnectionError:
                pass
            return True

        pump(closed, server)


def test_socket_files_need_no_keys(
    folders: Folders,
    tmp_path: Path,
    make_locked: Make,
    make_server: Make,
    make_client: Make,
    pump: Make,
) -> None:
    server, robot = make_locked(folders[0]), make_locked(None)
    robot.connect(server.serve(f"ipc://{tmp_path}/policy", make_server()), make_client())
    pump(lambda got: bool(got[0] and got[1]), server, robot)


def test_a_server_with_a_socket_file_and_tcp_needs_keys_for_tcp_only(
    folders: Folders,
    tmp_path: Path,
    make_locked: Make,
    make_server: Make,
    make_client: Make,
    make_step: Make,
    pump: Make,
) -> None:
    """In this way, a policy server on a cluster serves simulators on its host and operators on other hosts."""
    server, link = make_locked(folders[0]), make_server()
    file, bound = (server.serve(endpoint, link) for endpoint in (f"ipc://{tmp_path}/policy", "tcp://127.0.0.1:*"))
    near, far, stranger = make_locked(None), make_locked(folders[1]), make_locked(None)
    near.connect(file, make_client("near"))
    far.connect(bound, make_client("far"))
    stranger.connect(bound, make_client("stranger"))
    pump(lambda got: bool(got[1] and got[2]), server, near, far)
    assert not [message for _, message in listen(_QUIET, stranger, server) if isinstance(message, Welcome)]
    owners = {peer.name: peer.owner for peer in server.peers("policy")}
    assert owners == {"near": "", "far": folders[1].identity().public}
    assert near.send("policy", make_step(1, source="near"))
    assert far.send("policy", make_step(1, source="far"))
    got, *_ = pump(lambda got: sum(isinstance(message, Step) for _, message in got[0]) == 2, server, near, far)
    assert {message.source for _, message in got if isinstance(message, Step)} == {"near", "far"}
    folders[0].revoke("robot-7")
    pump(lambda got: any(isinstance(message, Bye) for _, message in got[0]), server)
    assert [peer.name for peer in server.peers("policy")] == ["near"]


def test_processes_with_the_same_keys_trust_each_other(
    folders: Folders, make_locked: Make, make_server: Make, make_client: Make, pump: Make
) -> None:
    server, other = make_locked(folders[0]), make_locked(folders[0])
    other.connect(server.serve("tcp://127.0.0.1:*", make_server()), make_client())
    pump(lambda got: bool(got[0] and got[1]), server, other)


def test_without_keys_a_server_refuses_endpoints_beyond_loopback(make_locked: Make, make_server: Make) -> None:
    with pytest.raises(EndpointError, match="td3-robot keys create"):
        make_locked(None).serve("tcp://0.0.0.0:5555", make_server())


def test_unknown_clients_do_not_block_a_robot(
    linked: Linked,
    folders: Folders,
    make_step: Make,
    pump: Make,
    of: Make,
    stranger: Make,
    rng: np.random.Generator,
) -> None:
    """Some unknown clients send random bytes or nothing, so they do not finish a handshake.

    Other unknown clients try to send large messages with unknown keys.
    """
    server, robot, bound = linked
    with ExitStack() as stack:
        for size in [0] * 40 + [int(rng.integers(1, 200)) for _ in range(40)]:
            half_open = stack.enter_context(closing(socket.create_connection(_address(bound))))
            half_open.sendall(rng.bytes(size))
        for _ in range(20):
            flooder = stranger(folders[0].identity().public)
            flooder.connect(bound)
            flooder.send_multipart([b"weights", bytes(1 << 20)], copy=False)
        for _ in range(20):
            exchange(server, robot, make_step, pump, of)
        pump(lambda _: server.dropped()["denied"] >= 20, server)
    assert set(server.dropped()) == {"denied"}


class Relay:
    """Carries bytes between clients and a server over TCP. Without a server, it closes each connection at once.

    Attributes:
        accepted: number of connections so far.
        damage: maps ``server`` or ``client`` to a function that changes the next bytes to this side.
    """

    def __init__(self, target: str = "") -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._pairs: list[tuple[socket.socket, socket.socket, str]] = []  # source, sink, the side of the sink
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self.damage: dict[str, Callable[[bytes], bytes]] = {}

    def carry(self) -> None:
        """Accept the waiting connection, and carry the bytes that have arrived."""
        with suppress(BlockingIOError):
            near = self._listener.accept()[0]
            self.accepted += 1
            if self._target:
                far = socket.create_connection(_address(self._target))
                self._pairs += [(near, far, "server"), (far, near, "client")]
            else:
                near.close()
        for pair in list(self._pairs):
            with suppress(BlockingIOError):
                if pair in self._pairs:  # not closed since
                    self._carry(*pair)

    def _carry(self, source: socket.socket, sink: socket.socket, side: str) -> None:
        source.setblocking(False)
        try:
            data = source.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._pairs = [pair for pair in self._pairs if source not in pair]
            source.close()
            sink.close()
            return
        if change := self.damage.pop(side, None):
            data = change(data)
        sink.setblocking(True)
        sink.sendall(data)

    def close(self) -> None:
        for one in {self._listener, *(each for pair in self._pairs for each in pair[:2])}:
            one.close()


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _endless(data: bytes) -> bytes:
    """The header of a ZMTP frame of 2^63 bytes."""
    return b"\x02" + b"\x7f" * (len(data) - 1)


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
