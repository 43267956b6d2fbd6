"""Something that only one process of this machine may have at a time."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable

from td3_robot.errors import UsageError

_CREDENTIALS = struct.Struct("iII")  # pid, uid and gid of unix(7)
_LOOK = 0.1  # seconds between two tries


def claim(
    what: str, refusal: str, patience: float = 0.0, stopped: Callable[[], object] = lambda: False
) -> socket.socket:
    """Hold it until the socket is closed or the process ends, however it ends.

    It is an abstract Unix address (unix(7)): no file is left behind, and no user's permissions matter, so another user
    can take it first; processes in another network namespace are another machine.

    Args:
        what: names it.
        refusal: the text of the error, to which is added which process has it, of which user.
        patience: seconds for which one that is about to end is waited for.
        stopped: asked while waiting; if so, there is no more waiting.

    Raises:
        UsageError: another process has it.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return _claim(what, refusal)
        except UsageError:
            if time.monotonic() >= end or stopped():
                raise
            time.sleep(_LOOK)


def _claim(what: str, refusal: str) -> socket.socket:
    address = f"\0td3-robot-{hashlib.sha256(what.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        held.bind(address)
        held.listen(socket.SOMAXCONN)  # so that who holds it can be asked of the kernel
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise UsageError(refusal + _holder(address)) from None
    return held


def _holder(address: str) -> str:
    """Who holds an address, in words; empty where that cannot be told any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:  # it has just ended, or nobody else can be asked: too many have
            return ""
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return f" (process {process}" + (")" if user == os.getuid() else f" of another user, {user})")
