"""Checks the addresses of links before a socket opens."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import shlex
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from td3_robot.errors import EndpointBusyError, EndpointError

SOCKETS_PREFIX = "td3-robot-"
"""Prefix of folders for sockets, see :func:`socket_home`."""
LONGEST_SOCKET_PATH = 107
"""Longest path of a socket, in bytes. ``sun_path`` in unix(7) has 108 bytes, and the last byte must be zero."""
SOCKET_MODE = 0o600
"""Mode of the socket files that this program makes. It distinguishes them from the sockets of other programs."""

_TCP = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([^:;\[\]/]+)):([0-9]{1,5}|\*)")


def socket_home() -> Path:
    """The folder for sockets: the user's runtime folder if it is writable, else the folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir())


def check(endpoint: str, *, bind: bool, keys: bool = False) -> None:
    """Check an endpoint. Allowed are ``ipc://PATH``, ``tcp://`` on loopback and, with keys, ``tcp://`` anywhere.

    Args:
        bind: whether this process will serve the endpoint.
        keys: whether this process has keys.

    Raises:
        EndpointError: the endpoint is malformed or too long. Or this process has no keys, and other machines can reach
            the endpoint. If ``bind`` is true, there are three more reasons: the folder of the ``ipc://`` path is
            missing, another process serves the path, or the file at the path is not a stale socket of this program.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if rest[0] in "@*" or not rest.isprintable():  # every user can connect to @NAME; * means a random path
            raise EndpointError(f"endpoint {endpoint!r} is not the path of a socket file; allowed: ipc://PATH")
        if len(os.fsencode(rest)) > LONGEST_SOCKET_PATH:
            size = len(os.fsencode(rest))
            raise EndpointError(
                f"endpoint {endpoint!r} has a path of {size} bytes; allowed: at most {LONGEST_SOCKET_PATH}"
            )
        if bind:
            _check_free(endpoint, Path(rest))
        return
    match = _TCP.fullmatch(rest) if scheme == "tcp" else None
    if match is None:
        raise EndpointError(f"endpoint {endpoint!r} is not understood; allowed: ipc://PATH, tcp://HOST:PORT")
    port = match[3]
    if not (bind if port == "*" else 1 <= int(port) <= 65535):
        raise EndpointError(f"endpoint {endpoint!r} has port {port}; allowed: 1 to 65535; a server may also use *")
    if not keys and not local(endpoint):
        raise EndpointError(
            f"endpoint {endpoint!r} is beyond loopback, and there are no keys: make them with 'td3-robot keys create "
            "NAME', exchange them with 'td3-robot keys allow', and set the folder of the keys (in endpoints.keys, or "
            "in the argument 'keys')"
        )


def is_tcp(endpoint: str) -> bool:
    """Whether an endpoint uses TCP. Keys protect TCP; the file mode protects a socket file."""
    return endpoint.startswith("tcp://")


def with_host(endpoint: str, host: str) -> str:
    """Return a ``tcp://`` endpoint with another host: a name, an address, an interface, or ``*``. The port stays."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.rpartition(':')[2]}"


def ipv6(endpoint: str) -> bool:
    """Whether a well-formed endpoint needs IPv6: it has an IPv6 address, or a host name with only IPv6 addresses.

    This function waits until the host name is resolved. To avoid this wait on a robot, use an address, or a name from
    the robot's hosts file.
    """
    match = _TCP.fullmatch(endpoint.removeprefix("tcp://")) if is_tcp(endpoint) else None
    if match is None or match[1] or match[2] == "*":
        return bool(match and match[1])
    with contextlib.suppress(OSError, UnicodeError):  # libzmq reports the error at connect
        return {found[0] for found in socket.getaddrinfo(match[2], None)} == {socket.AF_INET6}
    return False


def local(endpoint: str) -> bool:
    """Whether only this machine can reach a well-formed endpoint."""
    if not is_tcp(endpoint):
        return True
    match = _TCP.fullmatch(endpoint.removeprefix("tcp://"))
    host = (match[1] or match[2]) if match else ""
    with contextlib.suppress(ValueError):  # the host is a name, not an address
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def absolute(endpoint: str) -> str:
    """The endpoint with an absolute path. It is valid in every working folder."""
    scheme, _, rest = endpoint.partition("://")
    return f"ipc://{Path(rest).resolve()}" if scheme == "ipc" else endpoint


@contextlib.contextmanager
def binding(endpoint: str) -> Iterator[None]:
    """During the block, no other server of this program can check or bind an endpoint in the same folder.

    Without this lock, two servers that start together could both find the same stale socket. The second one would then
    replace the socket that the first one already serves.
    """
    with contextlib.ExitStack() as stack:
        if not is_tcp(endpoint):
            with contextlib.suppress(OSError):  # for example, this user has no permission to read the folder
                folder = Path(endpoint.removeprefix("ipc://")).parent
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _check_free(endpoint: str, path: Path) -> None:
    """Check that the folder exists, and that the path is free or holds a stale socket of this program.

    libzmq deletes any file at the path when it binds. The bus gives its socket files the mode SOCKET_MODE.

    Raises:
        EndpointError: the check failed.
    """
    if not path.parent.is_dir():
        raise EndpointError(f"endpoint {endpoint!r}: the folder {str(path.parent)!r} does not exist")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise EndpointError(f"endpoint {endpoint!r}: the path exists and is not a socket")
    if answers(path):
        raise EndpointBusyError(f"endpoint {endpoint!r} is busy: another process serves it")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != SOCKET_MODE:
        raise EndpointError(
            f"endpoint {endpoint!r}: nobody serves this socket, but another program or user made it; "
            f"delete it if nobody needs it: rm {shlex.quote(str(path))}"
        )


def answers(path: Path | str) -> bool:
    """Whether a process listens on a Unix socket.

    The result is also True if this is unknown: the queue of the socket is full, or access is denied.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True
