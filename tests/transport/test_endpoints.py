"""Test which endpoints a link may use. The check runs before a socket is opened."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from td3_robot.errors import EndpointError
from td3_robot.transport import endpoints


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """The path of a unix socket. Its server listens and has a queue for one connection."""
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(tmp_path / "live"))
        server.listen(0)
        yield tmp_path / "live"


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:5555", "tcp://127.9.9.9:1", "tcp://localhost:65535", "tcp://[::1]:5555", "ipc://relative"],
)
@pytest.mark.parametrize("bind", [True, False])
def test_endpoints_on_this_machine_are_allowed(endpoint: str, bind: bool) -> None:
    endpoints.check(endpoint, bind=bind)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5555",
        "tcp://*:5555",
        "tcp://192.168.1.7:5555",
        "tcp://[::]:5",
        "tcp://robot.local:5",
        "tcp://eth0:5",
    ],
)
@pytest.mark.parametrize("bind", [True, False])
def test_endpoints_beyond_loopback_need_keys(endpoint: str, bind: bool) -> None:
    with pytest.raises(EndpointError) as caught:
        endpoints.check(endpoint, bind=bind)
    assert str(caught.value) == (
        f"endpoint {endpoint!r} is beyond loopback, and there are no keys: make them with 'td3-robot keys create "
        "NAME', exchange them with 'td3-robot keys allow', and set the folder of the keys (in endpoints.keys, or "
        "in the argument 'keys')"
    )
    endpoints.check(endpoint, bind=bind, keys=True)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ipc://",
        "ipc:/path",
        "/run/policy",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:http",
        "tcp://127.0.0.1:٥٥",
        "tcp://127.0.0.1:123456",
        "tcp://127.0.0.1:5555/x",
        "tcp://eth0;127.0.0.1:5555 ",
        "tcp://[127.0.0.1]:5",
        "inproc://x",
        "pgm://127.0.0.1:5",
        "udp://127.0.0.1:5",
        "ipc://@abstract",
        "ipc://*",
        "ipc://a\0b",
        "ipc://a\nb",
    ],
)
@pytest.mark.parametrize("bind", [True, False])
def test_malformed_endpoints_are_refused(endpoint: str, bind: bool) -> None:
    with pytest.raises(EndpointError, match="endpoint"):
        endpoints.check(endpoint, bind=bind)


@pytest.mark.parametrize(("port", "bind"), [("0", True), ("0", False), ("65536", True), ("99999", False), ("*", False)])
def test_ports_out_of_range_are_refused(port: str, bind: bool) -> None:
    with pytest.raises(EndpointError, match="allowed: 1 to 65535; a server may also use \\*"):
        endpoints.check(f"tcp://127.0.0.1:{port}", bind=bind)


def test_a_server_may_use_any_free_port() -> None:
    endpoints.check("tcp://127.0.0.1:*", bind=True)


@pytest.mark.parametrize("bind", [True, False])
def test_a_socket_path_has_at_most_107_bytes(bind: bool) -> None:
    endpoints.check("ipc://" + "é" * 53 + "x", bind=bind)
    with pytest.raises(EndpointError, match="has a path of 108 bytes; allowed: at most 107"):
        endpoints.check("ipc://" + "é" * 54, bind=bind)


def test_the_folder_of_a_servers_socket_must_exist(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/missing/policy"
    with pytest.raises(EndpointError, match=r"the folder '.*/missing' does not exist"):
        endpoints.check(endpoint, bind=True)
    endpoints.check(endpoint, bind=False)  # a client may start before its server


def test_a_served_socket_is_busy_even_if_its_queue_is_full(listening: Path) -> None:
    for _ in range(3):  # the first probe fills the queue
        with pytest.raises(EndpointError, match="is busy: another process serves it"):
            endpoints.check(f"ipc://{listening}", bind=True)
    endpoints.check(f"ipc://{listening}", bind=False)


def test_a_stale_socket_may_be_replaced(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(tmp_path / "stale"))
    (tmp_path / "stale").chmod(endpoints.SOCKET_MODE)
    assert (tmp_path / "stale").is_socket()
    endpoints.check(f"ipc://{tmp_path}/stale", bind=True)


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing", "link to a stale socket", "pipe"])
def test_a_path_that_is_not_a_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("precious")
    else:
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(str(tmp_path / "stale"))
        path.symlink_to(tmp_path / ("stale" if kind == "link to a stale socket" else "nothing"))
    with pytest.raises(EndpointError, match="the path exists and is not a socket"):
        endpoints.check(f"ipc://{path}", bind=True)
    assert os.path.lexists(path)


def test_a_stale_socket_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other socket"
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))
    path.chmod(0o755)
    with pytest.raises(EndpointError) as caught:
        endpoints.check(f"ipc://{path}", bind=True)
    assert str(caught.value) == (
        f"endpoint 'ipc://{path}': nobody serves this socket, but another program or user made it; "
        f"delete it if nobody needs it: rm '{path}'"
    )
    assert path.is_socket()


def test_two_servers_that_start_together_bind_one_after_the_other(tmp_path: Path) -> None:
    """Without the lock of ``binding``, both servers could find the same stale socket.

    Then the second server would replace the socket of the first server.
    """
    endpoint, order = f"ipc://{tmp_path}/policy", list[str]()
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with endpoints.binding(endpoint):
            order.append("second")

    with endpoints.binding(endpoint):
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(60)
        thread.join(0.05)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_all_paths_to_a_socket_give_the_same_absolute_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {endpoints.absolute(f"ipc://{path}") for path in ("policy", "./policy", "link/policy", tmp_path / "policy")}
    assert names == {f"ipc://{tmp_path.resolve()}/policy"}
    assert endpoints.absolute("tcp://127.0.0.1:5555") == "tcp://127.0.0.1:5555"


@pytest.mark.parametrize(
    ("endpoint", "addresses", "expected"),
    [
        ("tcp://[::1]:5555", None, True),
        ("tcp://127.0.0.1:5555", None, False),
        ("ipc:///tmp/x", None, False),
        ("tcp://robot:5555", [socket.AF_INET6], True),
        ("tcp://robot:5555", [socket.AF_INET6, socket.AF_INET], False),
        ("tcp://robot:5555", OSError("no such host"), False),
    ],
)
def test_a_host_name_with_only_ipv6_addresses_uses_ipv6(
    endpoint: str, addresses: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, port: Any) -> list[Any]:
        if host != "robot":
            return list(real(host, port))
        if isinstance(addresses, OSError):
            raise addresses
        return [(family, socket.SOCK_STREAM, 6, "", ()) for family in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert endpoints.ipv6(endpoint) == expected
