"""Chooses free TCP ports and keeps them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000  # Ray's workers use lower ports
_END = 32_768  # here Linux's ephemeral range begins by default
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def keep_port() -> int:
    """Choose a TCP port that is free at all IPv4 addresses of this machine, and keep it until this process ends.

    Nothing listens at a kept port. Linux does not give the port to programs that ask for any free port. A program gets
    it only if it names the port and sets SO_REUSEADDR, as libzmq, Ray and asyncio do. So a link can be served at the
    port much later, and again after a restart.

    The port is below Linux's ephemeral range if possible.

    Raises:
        OSError: this machine has no free port.
    """
    choices = range(_FIRST, min(int(_EPHEMERAL.read_text().split()[0]), _END))
    for port in random.SystemRandom().sample(choices, min(_TRIES, len(choices))):
        try:
            return _keep(port)
        except OSError:  # taken
            continue
    return _keep(0)


def _keep(port: int) -> int:
    """Bind a port, and leave it bound. Port 0 lets Linux choose. Returns the port."""
    with socket.socket() as kept:
        kept.bind(("", port))
        # Only now: if this option is set before bind, two processes can keep the same port.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(kept.getsockname()[1])
        kept.detach()
        return port
