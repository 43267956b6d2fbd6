"""A kept port stays free for the process that keeps it, and is outside the range from which Linux chooses ports."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ServerLink
from td3_robot.util import ports


@pytest.fixture
def ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the first port of the ephemeral range."""

    def begin(first: int) -> None:
        (tmp_path / "range").write_text(f"{first}\t60999\n")
        monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")

    return begin


def test_a_kept_port_is_below_the_ephemeral_range(ephemeral: Callable[[int], None]) -> None:
    ephemeral(21_000)
    assert 20_000 <= ports.keep_port() < 21_000


def test_a_taken_port_is_not_kept(ephemeral: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one port is below the ephemeral range, and a server has it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_FIRST", taken)
        monkeypatch.setattr(ports, "_END", taken + 1)
        ephemeral(taken + 1)
        assert ports.keep_port() != taken


def test_a_port_is_kept_only_once(ephemeral: Callable[[int], None]) -> None:
    """The 60 calls share at most 50 ports below the ephemeral range. Linux chooses the others."""
    ephemeral(20_050)
    found = [ports.keep_port() for _ in range(60)]
    assert len(set(found)) == 60
    assert sum(port < 20_050 for port in found) <= 50


def test_another_program_cannot_take_a_kept_port() -> None:
    port = ports.keep_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_another_process_does_not_keep_the_same_port(
    ephemeral: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has kept a port. For this process, only that port is below the ephemeral range."""
    code = "from td3_robot.util.ports import keep_port; print(keep_port(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin
        assert other.stdout
        theirs = int(other.stdout.readline())
        monkeypatch.setattr(ports, "_FIRST", theirs)
        ephemeral(theirs + 1)
        assert ports.keep_port() != theirs
        other.stdin.close()


def test_a_link_can_be_served_at_a_kept_port_again_and_again() -> None:
    endpoint = f"tcp://127.0.0.1:{ports.keep_port()}"
    for _ in range(3):
        bus = Bus()
        assert bus.serve(endpoint, ServerLink("monitor", "monitor-0", {}, {}, 1)) == endpoint
        bus.close()


def test_linux_chooses_if_its_range_leaves_no_other_ports(ephemeral: Callable[[int], None]) -> None:
    ephemeral(1024)
    assert ports.keep_port() >= 1024
