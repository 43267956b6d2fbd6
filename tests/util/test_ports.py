"""Which programs can bind a kept port, and from which range it comes."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ClientLink, ServerLink, hello
from td3_robot.util import ports
from td3_robot.util.ports import keep_port, port_of


@pytest.fixture
def ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the first port of the ephemeral range, as this process sees it."""

    def begin(first: int) -> None:
        (tmp_path / "range").write_text(f"{first}\t60999\n")
        monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")

    return begin


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, ephemeral: Callable[[int], None]) -> Callable[[int], None]:
    """A function that leaves only one port below the ephemeral range."""

    def choose(port: int) -> None:
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_END", port + 1)
        ephemeral(port + 1)

    return choose


@pytest.fixture
def kept() -> Iterator[socket.socket]:
    with keep_port() as made:
        yield made


def test_a_kept_port_is_below_the_ephemeral_range(ephemeral: Callable[[int], None]) -> None:
    ephemeral(21_000)
    with keep_port() as made:
        port = port_of(made)
        assert 20_000 <= port < 21_000
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_process_keeps_each_port_only_once(ephemeral: Callable[[int], None]) -> None:
    """The range has only 50 ports, so Linux chooses the other ports."""
    ephemeral(20_050)
    with ExitStack() as stack:
        found = [port_of(stack.enter_context(keep_port())) for _ in range(60)]
    assert len(set(found)) == 60
    assert sum(port < 20_050 for port in found) <= 50


def test_linux_chooses_if_its_range_leaves_no_other_ports(
    ephemeral: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, asked = ports._keep, []

    def watched(port: int) -> socket.socket:
        asked.append(port)
        return keep(port)

    monkeypatch.setattr(ports, "_keep", watched)
    ephemeral(1024)
    with keep_port():
        assert asked == [0]


def test_the_port_of_a_server_is_not_kept(only: Callable[[int], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        only(port_of(server))
        with keep_port() as made:
            assert port_of(made) != port_of(server)


def test_too_many_open_files_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(port: int) -> socket.socket:
        raise OSError(errno.EMFILE, f"no file for port {port}")

    monkeypatch.setattr(ports, "_keep", fail)
    with pytest.raises(OSError, match="no file for port"):
        keep_port()


def test_another_process_does_not_keep_the_same_port(only: Callable[[int], None]) -> None:
    code = "import sys; from td3_robot.util.ports import *; kept = keep_port(); print(port_of(kept), flush=True)"
    words = [sys.executable, "-c", f"{code}; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        theirs = int(other.stdout.readline())
        only(theirs)
        with keep_port() as made:
            assert port_of(made) != theirs


@pytest.mark.parametrize(
    "address",
    [
        (socket.AF_INET, "127.0.0.1"),
        pytest.param(
            (socket.AF_INET6, "::1"), marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
        ),
    ],
)
def test_a_socket_without_reuseaddr_cannot_bind_a_kept_port(
    kept: socket.socket, address: tuple[socket.AddressFamily, str]
) -> None:
    family, host = address
    with socket.socket(family) as other, pytest.raises(OSError, match="in use") as refused:
        other.bind((host, port_of(kept)))
    assert refused.value.errno == errno.EADDRINUSE


def test_linux_does_not_choose_a_kept_port() -> None:
    """If kept ports were free for Linux, about 300 · 300 / 28,000 = 3 ports would be in both sets."""
    with ExitStack() as stack:
        mine = {port_of(stack.enter_context(ports._keep(0))) for _ in range(300)}
        theirs = set()
        for _ in range(300):
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            theirs.add(port_of(other))
        assert not mine & theirs


def test_a_link_can_be_served_at_a_kept_port_again_and_again(kept: socket.socket) -> None:
    """In each round, a client connects to the new server."""
    endpoint = f"tcp://127.0.0.1:{port_of(kept)}"
    for session in range(1, 4):
        server, client = Bus(), Bus()
        server.serve(endpoint, ServerLink("monitor", "monitor-0", {"node": ()}, {}, session))
        client.connect(endpoint, ClientLink("monitor", hello("node", "node-0", client=session), ()))
        while not client.welcome("monitor"):
            server.receive(0.01)
            client.receive(0.01)
        client.close()
        server.close()


def test_a_closed_socket_frees_its_port() -> None:
    with keep_port() as made:
        port = port_of(made)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
