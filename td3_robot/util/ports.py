"""Keeps free TCP ports for servers that start later."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_FIRST = 20_000  # Ray's workers use lower ports
_END = 32_768  # here Linux's ephemeral range begins by default
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def keep_port() -> socket.socket:
    """Bind a socket to a TCP port that is free at all addresses of this machine. To free the port, close the socket.

    The socket does not listen. While it is open, Linux does not choose its port for other programs, and other calls of
    this function do not choose it. A server can still bind the port if it sets SO_REUSEADDR first, as libzmq does. So
    a server can start at the port much later, and again after a crash.

    The port is below Linux's ephemeral range if possible.

    Raises:
        OSError: no port is free, or this process has too many open files.
    """
    choices = range(_FIRST, min(int(_EPHEMERAL.read_text().split()[0]), _END))
    for port in random.SystemRandom().sample(choices, min(_TRIES, len(choices))):
        try:
            return _keep(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _keep(0)


def port_of(kept: socket.socket) -> int:
    """Return the port of a socket."""
    port: int = kept.getsockname()[1]
    return port


def _keep(port: int) -> socket.socket:
    """Bind a socket to a port. Port 0 lets Linux choose the port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    kept = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            kept.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # bind the port for IPv4, too
        kept.bind(("", port))
        # Set this option after bind. If it were set before, two processes could keep the same port.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        kept.close()
        raise
    return kept
