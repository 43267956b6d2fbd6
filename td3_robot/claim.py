"""Something that only one process of this machine may have at a time."""

from __future__ import annotations

import errno
import hashlib
import socket

from td3_robot.errors import UsageError


def claim(what: str, refusal: str) -> socket.socket:
    """Hold it until the socket is closed or the process ends, however it ends.

    It is an abstract Unix address (unix(7)): no file is left behind, and no user's permissions matter; processes in
    another network namespace are another machine.

    Raises:
        UsageError: another process has it; ``refusal`` is the text.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        held.bind(f"\0td3-robot-{hashlib.sha256(what.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}")
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise UsageError(refusal) from None
    return held
