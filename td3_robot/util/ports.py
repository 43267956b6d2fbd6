"""Chooses free TCP ports."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_FIRST = 20_000  # Ray's workers use lower ports
_END = 32_768  # here Linux's ephemeral range begins by default
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
_chosen: set[int] = set()
"""The ports that this process has chosen. The caller has perhaps not used them yet."""


def free_port(address: str = "") -> int:
    """Return a TCP port that is free now at an IPv4 address of this machine; empty for all addresses.

    Linux chooses ports of the ephemeral range for all programs that need any port. This function chooses a lower port,
    and each port only once. So the port very probably stays free until the caller uses it.

    Raises:
        OSError: this machine has no free port at this address.
    """
    end = min(int(_EPHEMERAL.read_text().split()[0]), _END)
    choices = [port for port in range(_FIRST, end) if port not in _chosen]
    for port in random.SystemRandom().sample(choices, min(_TRIES, len(choices))):
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            _chosen.add(port)
            return port
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])
