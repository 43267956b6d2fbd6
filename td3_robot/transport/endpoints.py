"""Where links may be, checked before any socket is opened."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from pathlib import Path

from td3_robot.errors import EndpointError

LONGEST_SOCKET_PATH = 107
"""sun_path of unix(7) holds 108 bytes with its end mark."""


def check(endpoint: str, *, bind: bool) -> None:
    """Accept ``ipc://PATH`` and ``tcp://`` on loopback.

    Raises:
        EndpointError: malformed, too long, beyond loopback, or (when binding ipc) in use by a live process.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > LONGEST_SOCKET_PATH:
            raise EndpointError(
                f"endpoint {endpoint!r}: the socket path has {len(os.fsencode(rest))} bytes; "
                f"at most {LONGEST_SOCKET_PATH} are allowed"
            )
        if bind and _answers(rest):
            raise EndpointError(f"endpoint {endpoint!r} is busy: another process serves it")
        if bind and not Path(rest).parent.is_dir():
            raise EndpointError(f"endpoint {endpoint!r}: the folder {str(Path(rest).parent)!r} does not exist")
        return
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([^:\[\]/]+)):(\d{1,5}|\*)", rest) if scheme == "tcp" else None
    if match is None:
        raise EndpointError(f"endpoint {endpoint!r} is not understood; allowed: ipc://PATH, tcp://HOST:PORT")
    host = match[1] or match[2]
    if not _loopback(host):
        raise EndpointError(
            f"endpoint {endpoint!r} is beyond loopback; without keys only ipc:// and tcp://127.0.0.1 are allowed"
        )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _answers(path: str) -> bool:
    """Whether a live process listens on a unix socket: libzmq would silently take its path over."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
