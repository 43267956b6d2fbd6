"""The notifier sends systemd's notifications over a real socket, as sd_notify(3) describes."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

import pytest

from td3_robot.runtime.systemd import Notifier


def received(server: socket.socket) -> list[str]:
    words = []
    while True:
        try:
            words.append(server.recv(4096).decode())
        except BlockingIOError:
            return words


def listening(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(address)
    server.setblocking(False)
    return server


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_ready_is_sent_once_and_watchdog_four_times_per_timeout(tmp_path: Path, kind: str) -> None:
    name = f"td3-robot-test-{secrets.token_hex(8)}"
    address = str(tmp_path / "notify") if kind == "path" else f"@{name}"
    with listening(address if kind == "path" else f"\0{name}") as server:
        notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())})
        assert received(server) == []  # the notifier sends nothing before the first turn
        notifier.turn(10.0)
        assert received(server) == ["READY=1\nWATCHDOG=1"]
        for now in (10.1, 10.49, 10.5, 10.6):  # the watchdog period is 2 s / 4 = 0.5 s
            notifier.turn(now)
        assert received(server) == ["WATCHDOG=1"]


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_without_a_watchdog_only_ready_is_sent(tmp_path: Path, watchdog: dict[str, str]) -> None:
    with listening(str(tmp_path / "notify")) as server:
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), **watchdog})
        for now in (1.0, 2.0, 1e6):
            notifier.turn(now)
        assert received(server) == ["READY=1"]


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "2000000"}])
def test_notification_is_sent_later_if_the_socket_was_full(tmp_path: Path, watchdog: dict[str, str]) -> None:
    """systemd kills a service whose READY=1 does not arrive before the start timeout.

    So the notifier tries again after 0.1 s.
    """
    address = str(tmp_path / "notify")
    with listening(address) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others:
        others.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                others.sendto(b"", address)
        notifier = Notifier({"NOTIFY_SOCKET": address, **watchdog})
        notifier.turn(10.0)
        assert set(received(server)) == {""}
        notifier.turn(10.05)
        assert received(server) == []
        notifier.turn(10.11)
        assert received(server) == ["READY=1\nWATCHDOG=1" if watchdog else "READY=1"]


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_the_socket_of_systemd_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """systemd gives an absolute path, or an abstract name that begins with @."""
    monkeypatch.chdir(tmp_path)
    with listening("relative") as server:
        notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"})
        notifier.turn(1.0)
        notifier.turn(2.0)
        assert received(server) == []
