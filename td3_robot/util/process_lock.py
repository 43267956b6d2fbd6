"""Locks between processes. The operating system releases a lock when its process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from td3_robot.errors import UsageError

_CREDENTIALS = struct.Struct("iII")  # pid, uid and gid of unix(7)
_RETRY_PERIOD = 0.1  # seconds


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Lock a file during the block. Create the file if necessary. Only programs that call flock(2) respect the lock.

    While another process holds the lock, wait. If ``wait`` is False, raise BlockingIOError instead.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def hold(descriptor: int) -> None:
    """Lock an open file until it is closed. Do nothing if it is locked already, or if its file system has no locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(descriptor: int) -> bool:
    """Return whether :func:`hold` has locked the file through another descriptor, in this or another process.

    If the result is False, ``descriptor`` keeps a shared lock. Close it soon: until then, :func:`hold` cannot lock the
    file.

    Raises OSError if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def claim(
    what: str, refusal: str, patience: float = 0.0, stopped: Callable[[], object] = lambda: False
) -> socket.socket:
    """Claim the name ``what`` on this machine. The claim ends when the returned socket is closed or the process ends.

    The claim is an abstract Unix address (unix(7)). It needs no file and no permission, so another user can claim the
    name first. A process in another network namespace does not see the claim.

    While another process holds the name, wait at most ``patience`` seconds, or until ``stopped`` returns a true result.
    If another process still holds the name after this wait, raise a UsageError. The text of the error is ``refusal``,
    followed by the holder if the holder is known.
    """
    end = time.monotonic() + patience
    address = f"\0td3-robot-{hashlib.sha256(what.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"
    while True:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            claim.bind(address)
            claim.listen(socket.SOMAXCONN)  # so that other processes can ask the kernel which process holds the name
            return claim
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        if time.monotonic() >= end or stopped():
            raise UsageError(refusal + _holder(address))
        time.sleep(_RETRY_PERIOD)


def _holder(address: str) -> str:
    """Describe the process that holds an address, for the error text. The result is empty if the process is unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:  # the holder has just ended, or its queue of connections is full
            return ""
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return f" (process {process}" + (")" if user == os.getuid() else f" of the user with uid {user})")
