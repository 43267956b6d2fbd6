"""A real policy server gives a peer only the rights of the peer's key, and refuses the requests of web pages.

docs/explanation/security.md describes the rules.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
import zmq

import td3_robot as tr
from td3_robot.bench import example
from td3_robot.cli.main import main
from td3_robot.transport.keys import KeyFolder
from tests.conftest import free_port, poll_until
from tests.process.test_misbehaving_peers import Peer, hello, step

_PATIENCE = 60_000  # ms


class Server:
    """A policy server process on a free port of loopback, with keys if ``folder`` is given."""

    def __init__(self, path: Path, folder: KeyFolder | None) -> None:
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.path, self.folder = path, folder
        self.process: subprocess.Popen[bytes] | None = None
        endpoints = {"policy": self.endpoint, **({"keys": str(folder.path)} if folder else {})}
        example.bundle().save(path / "policy.safetensors")
        (path / "robot.yaml").write_text(yaml.safe_dump({"endpoints": endpoints, "policy": {"autostart": False}}))
        self.start()

    def start(self) -> None:
        self.stop()
        words = ["policy", "--bundle", "policy.safetensors", "--config", "robot.yaml"]
        with (self.path / "log").open("a") as log:
            command = [sys.executable, "-m", "td3_robot", *words]
            self.process = subprocess.Popen(command, cwd=self.path, stdout=log, stderr=log)
        self.operator = tr.connect(self.endpoint, keys=self.folder.path if self.folder else None, timeout=60)
        self.operator.state()  # waits for the server

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def dropped(self) -> dict[str, int]:
        counts: dict[str, int] = self.operator.state().detail["dropped"]
        return counts

    def connected(self) -> list[str]:
        names: list[str] = self.operator.state().detail["connected"]
        return names


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(folder: KeyFolder | None = None) -> Server:
        started.append(Server(tmp_path, folder))
        return started[-1]

    yield start
    for server in started:
        server.stop()


class Thief(Peer):
    """A stranger's program with a robot's key."""

    def __init__(self, context: zmq.Context[Any], server: Server, public: str, secret: str) -> None:
        assert server.folder
        super().__init__(context)
        self.socket.curve_publickey, self.socket.curve_secretkey = public.encode(), secret.encode()
        self.socket.curve_serverkey = server.folder.identity().public.encode()
        self.events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self.socket.connect(server.endpoint)

    def answer(self, topic: str, content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Send a message. Return the first answer other than a Heartbeat, which asks whether this client is alive."""
        kind, answer = self.ask(topic, content)
        while kind == "heartbeat":
            kind, answer = self.receive()
        return kind, answer

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close()
        self.socket.close()


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    """The key folder of the policy server. It allows the keys of two robots as drivers."""
    folder = KeyFolder(tmp_path / "keys")
    folder.create("server")
    for name in ("robot-7", "robot-8"):
        folder.allow(name, KeyFolder(tmp_path / name).create(name).public, "driver")
    return folder


@pytest.fixture
def thief(tmp_path: Path) -> Iterator[Callable[[Server, str], Thief]]:
    """Returns a function that connects with the key of a robot."""
    with zmq.Context() as context:
        made: list[Thief] = []

        def connect(server: Server, name: str) -> Thief:
            identity = KeyFolder(tmp_path / name).identity()
            made.append(Thief(context, server, identity.public, identity.secret))
            return made[-1]

        yield connect
        for one in made:
            one.close()


def command(verb: str, **changes: Any) -> dict[str, Any]:
    fields = {"id": 1, "target": "", "verb": verb, "reason": "", "version": 0, "sha256": "", "payload": b""}
    return fields | changes


def test_a_client_with_the_key_of_a_driver_cannot_give_commands_or_set_weights_or_act_as_another_peer(
    serve: Callable[..., Server], folder: KeyFolder, thief: Callable[[Server, str], Thief]
) -> None:
    server = serve(folder)
    assert server.operator.configure().state == "inactive"
    leg, other = thief(server, "robot-7"), thief(server, "robot-8")
    for role, reason in (
        ("operator", "may not have role operator"),
        ("simulator", "may not have role simulator"),
        ("policy", "role 'policy' is not served here"),
        ("learner", "role 'learner' is not served here"),
    ):
        kind, refused = leg.ask("hello", hello(role=role))
        assert (kind, refused["code"]) == ("refused", "agreement")
        assert reason in refused["reason"]
    assert leg.ask("hello", hello())[0] == "welcome"
    rival = hello(client=10, incarnation=99)
    assert other.ask("hello", rival)[0] == "heartbeat"  # the rival waits: the server checks whether ``leg`` is alive
    assert leg.receive()[0] == "heartbeat"
    kind, number = "heartbeat", 0
    while kind == "heartbeat":
        number += 1
        assert leg.answer("step", step(number))[0] == "action"
        kind, refused = other.ask("hello", rival)
    assert (kind, refused["code"]) == ("refused", "name")
    assert refused["reason"] == "name 'leg' is taken by a driver with another key"

    policy = (server.path / "policy.safetensors").read_bytes()
    for verb in ("configure", "activate", "load", "reset", "unfreeze", "takeover", "shutdown"):
        leg.send("command", command(verb, payload=policy if verb == "load" else b""))
    leg.send("weights", {"version": 9, "updates": 1, "env_steps": 1, "sha256": "", "payload": policy})
    leg.send("teleop", {"target": "leg", "robot": 0, "sequence": 1, "stamp": 1, "action": bytes(24)})
    leg.send("step", step(number + 1, source="arm"))
    kind, action = leg.answer("step", step(number + 2))
    assert (kind, action["answers"], action["weights_version"]) == ("action", number + 2, 0)  # version 0: safe action
    reply = server.operator.state()
    assert (reply.state, reply.detail["version"]) == ("inactive", 1)
    assert server.dropped()["unexpected"] == 2  # Weights and Teleop
    assert server.dropped()["identity"] == 1


def test_a_revoked_key_is_refused_while_the_server_runs_and_after_its_restart(
    serve: Callable[..., Server], folder: KeyFolder, thief: Callable[[Server, str], Thief]
) -> None:
    server = serve(folder)
    stolen = thief(server, "robot-7")
    assert stolen.ask("hello", hello())[0] == "welcome"
    assert server.connected() == ["leg"]
    assert main(["keys", "revoke", "robot-7", "--keys", str(folder.path)]) == 0
    poll_until(lambda: server.connected() == [], lambda: f"still connected: {server.connected()}")
    while stolen.socket.poll(0):
        # Before the server forgot this client, the server possibly sent Commands. It sent nothing else.
        assert stolen.receive()[0] == "command"
    stolen.send("hello", hello())
    poll_until(lambda: server.dropped().get("revoked"), lambda: f"dropped: {server.dropped()}")
    again = thief(server, "robot-7")
    assert again.events.poll(_PATIENCE)  # libzmq refuses the handshake
    server.start()
    after = thief(server, "robot-7")
    assert after.events.poll(_PATIENCE)
    assert not stolen.socket.poll(0)
    assert server.connected() == []


def frame(content: bytes, *, more: bool = False) -> bytes:
    """A frame of ZMTP 1.0 (ZeroMQ RFC 13): length, flags, content."""
    size = len(content) + 1
    return (bytes([size]) if size < 255 else b"\xff" + struct.pack(">Q", size)) + bytes([more]) + content


def requests(port: int) -> dict[str, bytes]:
    """Return requests by name: bytes that a web page in a browser can send to a port, and the first bytes of TLS."""
    agent = "User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"
    top = f"Host: 127.0.0.1:{port}\r\nConnection: keep-alive\r\n{agent}\r\nOrigin: http://page.example\r\n"
    upgrade = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    messages = [("hello", hello(role="operator", name="page")), ("command", command("shutdown"))]
    smuggled = b"".join(frame(topic.encode(), more=True) + frame(msgpack.packb(fields)) for topic, fields in messages)
    # The body begins with 400 bytes \1. libzmq reads each pair \1\1 as an empty frame: the length 1, then the flag
    # "more". So all these empty frames belong to one message. The bytes \3\2\0\0 end this message, whether libzmq reads
    # \3 as a length or as a flag. As a length: \3\2\0\0 is a last frame of two bytes. As a flag: \1\3 is an empty frame
    # with the flag "more", and \2\0\0 is a last frame of one byte.
    body = b"\1" * 400 + b"\3\2\0\0" + smuggled
    length = f"Content-Length: {len(body)}\r\nContent-Type: text/plain;charset=UTF-8\r\n"
    return {
        "request": f"GET / HTTP/1.1\r\n{top}\r\n".encode(),
        "websocket": f"GET / HTTP/1.1\r\n{top}{upgrade}\r\n".encode(),
        "smuggled": f"POST / HTTP/1.1\r\n{top}{length}\r\n".encode() + body,
        "tls": bytes.fromhex("16030100c8010000c40303") + bytes(190),
    }


def wait_for_refusal(port: int, request: bytes) -> None:
    """Send the bytes, and wait until the server closes the connection. The server must not answer in HTTP.

    Raises:
        TimeoutError: the server has not closed the connection.
    """
    with closing(socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE / 1e3)) as page:
        page.sendall(request)
        try:
            while answer := page.recv(1000):
                assert not answer.startswith(b"HTTP")
        except ConnectionError:
            pass


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_web_page_is_refused_by_the_port_of_a_server(
    with_keys: bool, serve: Callable[..., Server], folder: KeyFolder
) -> None:
    """The request ``smuggled`` contains frames of ZMTP 1.0.

    On a port without keys and without a ZAP domain, libzmq accepts such frames. So a server without keys sets a ZAP
    domain.
    """
    server = serve(folder if with_keys else None)
    for request in requests(server.port).values():
        wait_for_refusal(server.port, request)
    reply = server.operator.state()  # the server still works
    assert reply.detail["dropped"] == {}
    assert reply.state == "unconfigured"
