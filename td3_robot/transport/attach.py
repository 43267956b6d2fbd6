"""Finds the listeners (monitors and recorders) that attach to a running node.

A listener binds the first free socket of its link on this machine. The possible sockets are the *places* of the link:
``ENDPOINT``, ``ENDPOINT.2``, ``ENDPOINT.3``, …. Each node looks for these socket files and connects to them. So nobody
edits a configuration, and the number of listeners is limited only by PLACES. Over a network, a listener needs an
endpoint in the configuration.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from td3_robot.errors import EndpointError
from td3_robot.transport import endpoints
from td3_robot.transport.link import ClientLink
from td3_robot.transport.tap import Tap

PLACES = 32
"""A node has at most PLACES monitors and at most PLACES recorders. This limits the work of the node."""
LOOK_PERIOD = 1.0
"""Seconds between two looks for new listeners."""

_SETTLED = 2.0  # s; if two changes of a folder are this far apart, they certainly have different time stamps
_IPC = "ipc://"


def beside(policy: str, link: str) -> str:
    """The endpoint of monitors or recorders of a deployed robot; empty if there is none.

    The endpoint is beside the socket of the policy server. If the server uses TCP, the endpoint is in a folder of this
    user, and the name of the endpoint contains the port.
    """
    if endpoints.is_tcp(policy):
        port = policy.rpartition(":")[2]
        return f"{_IPC}{_folder()}/{port}.{link}" if port != "*" else ""
    return f"{endpoints.absolute(policy)}.{link}" if policy else ""


def places(endpoint: str) -> list[str]:
    """All places of an ``ipc://`` endpoint or of a socket file, in the order of use."""
    return [endpoint, *(f"{endpoint}.{number}" for number in range(2, PLACES + 1))]


def prepare(endpoint: str) -> None:
    """Make the folder for listeners (see :func:`beside`) if the endpoint is in it.

    Raises:
        EndpointError: the folder cannot be made, or another user may write in it.
    """
    folder = Path(endpoint.removeprefix(_IPC)).parent
    if folder != _folder():
        return
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        remedy = "delete the file of this name, or set TMPDIR to another folder for all processes"
        what = f"the folder {str(folder)!r} cannot be made: {error.strerror}"
        raise EndpointError(f"endpoint {endpoint!r}: {what}; {remedy}") from None
    if not _is_private(folder):
        raise EndpointError(f"endpoint {endpoint!r}: another user can write in {str(folder)!r}; delete this folder")


class Search:
    """Looks for the listeners that serve the places of an endpoint. Listeners attach and detach while a node runs.

    Args:
        client: makes the handshake with one listener.
        skip: leave out the first place, because the configuration names it and the node connects to it anyway.
    """

    def __init__(self, endpoint: str, client: Callable[[], ClientLink], *, skip: bool) -> None:
        self._paths = {place: Path(place.removeprefix(_IPC)) for place in places(endpoints.absolute(endpoint))[skip:]}
        self._folder = Path(endpoint.removeprefix(_IPC)).absolute().parent
        self._changed = -1  # time stamp of the folder's last change
        self._settled_at = 0.0  # after this time (s), a new change gets a new time stamp
        self._client = client
        self._taps: dict[str, Tap] = {}  # taps of the attached listeners, by place

    def look(self) -> set[str] | None:
        """Return the places with a socket file of this user; None if they surely are the same as at the last call.

        If the time stamp of the folder has not changed for _SETTLED seconds, the method skips its check of the places,
        because the check would delay the control loop.
        """
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            self._changed = -1
            return set()
        now = time.monotonic()
        if changed != self._changed:
            self._changed, self._settled_at = changed, now + _SETTLED
        elif now >= self._settled_at:
            return None
        if self._folder == _folder() and not _is_private(self._folder):
            self._changed = -1  # a change of the folder's mode does not change its time stamp
            return set()
        return {place for place, path in self._paths.items() if _is_ours(path)}

    def turn(self, connect: Callable[[str, ClientLink], Tap], detach: Callable[[Tap], None]) -> None:
        """Connect to the listeners that have attached, and forget those that have detached."""
        served = self.look()
        if served is None:
            return
        for place in self._taps.keys() - served:
            detach(self._taps.pop(place))
        for place in served - self._taps.keys():
            with contextlib.suppress(EndpointError):  # for example, the absolute path is too long for a socket
                self._taps[place] = connect(place, self._client())


def _folder() -> Path:
    """The folder for listeners of robots whose policy server uses TCP."""
    return Path(tempfile.gettempdir()) / f"{endpoints.SOCKETS_PREFIX}listeners-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # another program may delete the folder at any time
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return False


def _is_ours(path: Path) -> bool:
    """Whether the path is a socket of this user. A node sends its messages to no other user."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
    return False
