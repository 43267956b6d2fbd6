"""Free ports are outside the range from which Linux chooses ports."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from td3_robot.util import ports


@pytest.fixture
def ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the first port of the ephemeral range. No port has been chosen yet."""
    monkeypatch.setattr(ports, "_chosen", set())

    def begin(first: int) -> None:
        (tmp_path / "range").write_text(f"{first}\t60999\n")
        monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")

    return begin


def test_a_free_port_is_below_the_ephemeral_range(ephemeral: Callable[[int], None]) -> None:
    ephemeral(21_000)
    port = ports.free_port("127.0.0.1")
    assert 20_000 <= port < 21_000
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_taken_port_is_not_chosen(ephemeral: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two ports remain, and one of them is taken."""
    ephemeral(21_000)
    free = ports.free_port("127.0.0.1")
    monkeypatch.setattr(ports, "_FIRST", free)
    monkeypatch.setattr(ports, "_chosen", set())
    ephemeral(free + 2)
    with socket.create_server(("127.0.0.1", free)):
        assert ports.free_port("127.0.0.1") != free


def test_a_port_is_chosen_only_once(ephemeral: Callable[[int], None]) -> None:
    ephemeral(20_050)
    found = [ports.free_port("127.0.0.1") for _ in range(60)]
    assert len(set(found)) == 60
    assert sum(port < 20_050 for port in found) <= 50


def test_linux_chooses_if_its_range_leaves_no_other_ports(ephemeral: Callable[[int], None]) -> None:
    ephemeral(1024)
    assert ports.free_port("127.0.0.1") >= 1024


def test_an_address_of_another_machine_is_an_error() -> None:
    """The address 192.0.2.1 is reserved for documentation (RFC 5737)."""
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")
